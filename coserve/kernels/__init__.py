"""Kernels: each has a plain PyTorch twin of the same signature, and is chosen once, when the model is built."""
