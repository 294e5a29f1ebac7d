"""Measurements of coserve on a machine, beside what others reach there, and their reports."""
