"""vLLM endpoints and the load that measures them."""
