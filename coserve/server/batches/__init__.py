"""Batches: files of requests that run in the background."""
