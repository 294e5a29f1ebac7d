"""Profiles: measured speed of a model on a device, kept on disk."""
