"""What turns a plan into artifacts, and loads them again in this process."""
