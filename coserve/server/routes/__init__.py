"""Routes, one file per group, found by the file: its `router`."""
