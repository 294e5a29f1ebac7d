"""Messages between the engine and a device: frozen, serialisable values of ids and numbers."""
