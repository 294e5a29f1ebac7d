"""Kernels: what may have a fast version on some device. Each is plain PyTorch, or has a plain twin of its signature.

Attention is chosen by device, once, when the model is built; what works row by row, at each call (`cpu/`, compiled, or
plain); dropout masks and packed signs are plain everywhere.
"""
