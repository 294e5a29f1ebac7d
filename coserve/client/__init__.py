"""An HTTP client of a running server, for the commands and the experiments."""
