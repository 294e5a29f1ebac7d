"""Simulation: the same engine and policies on a device that only says how long it would take, by a virtual clock."""

from coserve.simulate.hardware import Hardware, roofline_profile
from coserve.simulate.modelled_runner import ModelledRunner, VirtualClock
from coserve.simulate.simulation import Arrival, Simulation, Snapshot

__all__ = ["Arrival", "Hardware", "ModelledRunner", "Simulation", "Snapshot", "VirtualClock", "roofline_profile"]
