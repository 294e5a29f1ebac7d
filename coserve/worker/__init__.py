"""The engine in a process of its own: its loop, its link to whoever started it, and commands of jobs."""
