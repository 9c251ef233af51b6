"""Local algebra on a weight and the Gram matrix of its input: tensors in, tensors out. One method, one file."""
