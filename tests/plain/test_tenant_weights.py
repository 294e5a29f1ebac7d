"""Weights of tenants that the engine accepts."""

import pytest

from coserve.engine.config import EngineConfig


@pytest.mark.parametrize("weight", [1e20, 1e-20, 0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_leaves_others_no_part_is_refused(weight: float):
    """Beside a weight of 1e20 the part of others is 0 in floating point, by which a plan would
    divide."""
    with pytest.raises(ValueError, match=r"tenant_weights must be numbers from 0\.001 to 1000"):
        EngineConfig(tenant_weights={"a": weight})


@pytest.mark.parametrize("weight", [0.001, 2, 1000.0])
def test_weights_within_the_range_are_accepted(weight: float):
    assert EngineConfig(tenant_weights={"a": weight}).tenant_weights == {"a": weight}
