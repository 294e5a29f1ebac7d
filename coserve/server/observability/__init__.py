"""Metrics, status, traces, and the state of the engine and the disk."""
