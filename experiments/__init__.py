"""Experiments on coserve: measurements of its parts, comparisons with others, and figures of papers."""
