"""Sandbox: calls in processes of their own, with limits on memory, stack and time.

A crash fails only the one call.
"""
