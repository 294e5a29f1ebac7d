"""State that the server keeps in its store, once it has opened that."""
