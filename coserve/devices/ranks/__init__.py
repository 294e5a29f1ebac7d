"""Ranks: several processes that hold one model and act as one device."""
