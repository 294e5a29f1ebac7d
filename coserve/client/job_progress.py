"""Progress of a fine-tuning job and state of the server, as a client polls them."""

import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from coserve.client.http import Client

OVER = ("succeeded", "failed", "cancelled")
ANSWERS = ("valid_exact_match", "valid_json_valid", "valid_json_match")


@dataclass(kw_only=True)
class PolledJob:
    """State of a job and the server, as of the last poll."""

    job: dict[str, Any]
    """The job, as the API returns it."""
    status: dict[str, Any] = field(default_factory=dict)
    """State of the server, as /v1/status returns it."""
    losses: dict[int, float] = field(default_factory=dict)  # by step
    step: int = 0
    """Optimizer steps so far."""
    num_steps: int | None = None
    """Optimizer steps in all; None until known."""
    validation_loss: float | None = None
    """Last validation loss."""
    tokens_per_s: float | None = None
    """Last training speed."""
    reward_margin: float | None = None  # of a job that learns preferences
    answers: dict[str, float] = field(
        default_factory=dict
    )  # metrics of its answers to the validation file
    _last_event: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.job["status"] in OVER

    @property
    def loss(self) -> float | None:
        return list(self.losses.values())[-1] if self.losses else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the estimated end; None without an estimate."""
        finish = self.job.get("estimated_finish")
        return None if finish is None or self.is_terminal else max(0.0, finish - time.time())

    def poll(self, client: Client) -> list[dict[str, Any]]:
        """Ask the server once, and return new events, the oldest first."""
        self.job = client.get(f"/v1/fine_tuning/jobs/{self.job['id']}")
        known = self.job.get("coserve") or {}
        self.step, self.num_steps = (
            known.get("step") or self.step,
            known.get("total_steps") or self.num_steps,
        )
        new = events_after(client, self.job["id"], self._last_event)
        for event in new:
            self._last_event = event["id"]
            if event.get("type") == "metrics":
                self._measure(event.get("data") or {})
        self.status = client.get("/v1/status")
        return new

    def _measure(self, data: dict[str, Any]) -> None:
        self.step = data.get("step") or self.step
        self.num_steps = data.get("total_steps") or self.num_steps
        self.tokens_per_s = data.get("tokens_per_s") or self.tokens_per_s
        self.reward_margin = data.get("train_reward_margin", self.reward_margin)
        if data.get("train_loss") is not None:
            self.losses[data["step"]] = data["train_loss"]
        if data.get("valid_loss") is not None:
            self.validation_loss = data["valid_loss"]
        self.answers |= {name: data[name] for name in ANSWERS if data.get(name) is not None}

    def summary(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "job": self.job["id"],
            "status": self.job["status"],
            "fine_tuned_model": self.job.get("fine_tuned_model"),
            "trained_tokens": self.job.get("trained_tokens"),
            "steps": self.step,
            "train_loss": self.loss,
            "valid_loss": self.validation_loss,
            **self.answers,
        } | ({} if self.reward_margin is None else {"reward_margin": self.reward_margin})


def events_after(client: Client, job_id: str, last: str | None) -> list[dict[str, Any]]:
    """Return events newer than one, the oldest first."""
    newest_first = client.each(f"/v1/fine_tuning/jobs/{job_id}/events")
    return list(takewhile(lambda event: event["id"] != last, newest_first))[::-1]
