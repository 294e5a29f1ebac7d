"""Simulation: the same engine and policies on a device that only reports how long it would take, by
a virtual clock.
"""
