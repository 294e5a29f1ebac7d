"""Care of a home on disk: backup, restore, checks, and changes while no server runs."""
