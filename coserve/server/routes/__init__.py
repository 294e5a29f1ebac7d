"""Routes: one file per group, whose `router` is found by the file."""
