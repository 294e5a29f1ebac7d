"""The engine in a process of its own: its loop, its link to the server, commands, when checkpoints are taken."""
