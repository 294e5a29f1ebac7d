"""The wire between a server and the engine's process: messages, and the files in the home where
both ends meet.
"""
