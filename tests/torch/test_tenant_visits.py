"""The cost of sharing under the default policy for a tenant that is alone but for short visits of
others."""

from collections.abc import Sequence

import pytest
from simulated import GPU, harvest, make_engine, submit

from coserve.simulate.simulation import Arrival, Simulation

SECONDS = 5.0


def rows_trained(arrivals: Sequence[Arrival] = ()) -> float:
    """Return the rows per second of a job of tenant b beside these requests."""
    engine = make_engine("qwen2.5-0.5b", GPU, num_pages=8000, num_jobs=0)
    submit(engine, tenant="b")
    for _ in Simulation(engine, list(arrivals)).run(SECONDS):
        pass
    return harvest(engine)


def test_a_visit_of_another_tenant_does_not_slow_a_lone_tenants_job_down():
    visit = Arrival(at_s=0.01, num_prompt_tokens=5, num_output_tokens=1, tenant="visitor")
    assert rows_trained([visit]) == pytest.approx(rows_trained(), rel=0.02)
