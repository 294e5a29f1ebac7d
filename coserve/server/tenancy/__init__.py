"""Tenants: their keys, their limits, and their turns at shared resources."""
