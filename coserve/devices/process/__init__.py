"""A device in a process of its own, and the wire to it."""
