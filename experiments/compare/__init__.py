"""Comparison of every policy, and of separate processes, on one trace."""
