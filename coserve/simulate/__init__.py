"""Simulation: the same engine and policies on a device that only says how long it would take, by a
virtual clock.
"""
