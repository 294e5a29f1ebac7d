"""Service level objectives: what is promised, what is left of the promise, and what one step may
take of it.
"""

from coserve.scheduling.slo.promise import (
    DEFAULT_TPOT_STEPS,
    MIN_DEFAULT_TPOT_S,
    MIN_TIMES_ALONE,
    SOLO_CONTEXT,
    DefaultSlo,
    Slo,
    default_tpot_s,
    feasible_slo,
)

__all__ = [
    "DEFAULT_TPOT_STEPS",
    "MIN_DEFAULT_TPOT_S",
    "MIN_TIMES_ALONE",
    "SOLO_CONTEXT",
    "DefaultSlo",
    "Slo",
    "default_tpot_s",
    "feasible_slo",
]
