"""Nodes in virtual time under the same scheduler and placements as real ones: a pipeline of stages
as LeMix has it, the engine on a modelled device (fine), and a fluid model of that (coarse, fast).
"""
