"""State that the server has once its store is open."""
