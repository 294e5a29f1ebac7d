"""The device on PyTorch, for CPUs and GPUs by one code path."""
