"""Chunked training with chunks of one size, the baseline of LLMStation (sections 2.3 and 6.1).

A training sequence is cut into chunks of as many tokens, whatever the load; a step of inference
takes one chunk along: its rows forward, in one batch with the requests', or through the loss, or
backward through all layers. Unlike in `token_fusion` nothing is predicted: the SLO is held if the
chunk was chosen small enough. Without requests, nothing is cut, to spare the cost of each chunk; a
request that arrives then waits for the current pass.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies._turns import next_job, serving_step
from coserve.scheduling.policies.base import Policy, setting


@dataclass(frozen=True, kw_only=True)
class ChunkedTraining(Policy):
    """Chunked training: a chunk of one size of a job in every step."""

    summary: ClassVar[str] = "a chunk of one size of a job in every step (chunked training)"
    runs_whole_passes: ClassVar[bool] = True

    chunk_tokens: int = setting(128, "Tokens of a job that a step takes along.", least=16)

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory, build = serving_step(view, latency)
        if (job := next_job(view, memory)) is not None:
            build.take(
                job,
                self.chunk_tokens if memory.requests else job.num_rows,
                job.info.counts.num_parts,
            )
        return build.build()
