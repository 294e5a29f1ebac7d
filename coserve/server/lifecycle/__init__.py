"""Start and end of a server: its home, its announcement, and the jobs in it."""
