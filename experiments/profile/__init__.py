"""Time of a step by its parts, each beside its floor."""
