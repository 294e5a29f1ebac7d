"""Placements on a cluster of LeMix's settings, and on three nodes of this machine."""
