"""Measurements of what coserve reaches on a machine, beside what others reach, and reports of them."""
