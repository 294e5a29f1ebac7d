"""Recordings of all that passes between an engine and its device, and their replay."""
