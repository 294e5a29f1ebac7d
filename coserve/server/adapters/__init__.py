"""Catalogues of the adapters that requests can name."""
