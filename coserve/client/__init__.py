"""HTTP client of a running server, for commands and experiments."""
