"""Requests to generate, from a body to the engine and back; completions and embeddings."""
