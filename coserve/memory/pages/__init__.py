"""Bookkeeping of pages: which pages are free, and what the others hold. No tensors."""
