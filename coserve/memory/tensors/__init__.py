"""Tensors in pages, and copies of pages to and from other memory."""
