"""Suites through lm-eval, perplexity and KL, and the sandbox that runs generated code."""
