"""Nodes in virtual time under the scheduler and placements of real ones.

A pipeline of stages as in LeMix, the engine on a modelled device (fine), and a fluid model of that
(coarse and fast).
"""
