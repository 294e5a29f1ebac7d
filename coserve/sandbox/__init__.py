"""Sandbox: calls in processes of their own, with limits on memory, stack and time, so that a crash
costs one call.
"""
