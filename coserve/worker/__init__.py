"""The engine's process: its loop, what it does with each command, when checkpoints are taken, and
its ranks.
"""
