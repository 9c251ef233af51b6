"""Other people's tools, each in its own locked environment, spoken to by JSON files.

locks/ pins the environments, build.py makes them, run.py runs a script of jobs/ inside one.
"""
