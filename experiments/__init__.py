"""Experiments on coserve: measurements of its parts, comparisons with others, figures of papers."""
