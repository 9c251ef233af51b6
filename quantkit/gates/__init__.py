"""Scores and timings in, verdicts out: pure statistics, no files, no torch."""
