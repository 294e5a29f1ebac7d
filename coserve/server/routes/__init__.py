"""One file per group of routes, each with its `router`."""
