"""The engine in a process of its own: its loop, its link to the process that started it, and commands of jobs."""
