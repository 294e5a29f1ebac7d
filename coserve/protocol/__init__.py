"""The wire between a server and the engine's process: messages, and where in the home both ends
meet.
"""
