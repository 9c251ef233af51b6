"""Cheap to serve, and proved to work still: quantize, judge, serve and publish large language models."""
