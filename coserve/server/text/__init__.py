"""Conversion between text and tokens in the server's process."""
