"""Options of memory, SLOs, the scheduling policy, and limits on what runs at once."""

from dataclasses import dataclass

from coserve.handover.roles import ROLES
from coserve.scheduling.policies import DEFAULT_POLICY, policy_names
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, MIN_DEFAULT_TPOT_S
from coserve.server.options.option import OptionGroup, check_choice, check_seconds, option
from coserve.server.units import bytes_of, seconds_of, slo_seconds
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions(OptionGroup):
    """Options of memory, SLOs, the scheduling policy, and limits on what runs at once."""

    memory_bytes: int | None = option(
        None,
        "--memory",
        "Size of the page pool for keys and values of requests and activations of jobs, such as "
        "4GiB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="a share of what is free",
    )
    host_memory_bytes: int = option(
        0,
        "--host-memory",
        "Host memory for pages of preempted requests and jobs, such as 8GiB; without it, they are "
        "recomputed.",
        parse=bytes_of,
        metavar="SIZE",
        shown="none",
    )
    ttft_s: float = option(
        2.0,
        "--slo-ttft",
        "SLO for the time to the first token, such as 500ms or 2s.",
        parse=slo_seconds,
        metavar="TIME",
        shown="2s",
    )
    tpot_s: float | None = option(
        None,
        "--slo-tpot",
        "SLO for the mean time per later token, such as 40ms or 0.04s.",
        parse=slo_seconds,
        metavar="TIME",
        shown=(
            f"{DEFAULT_TPOT_STEPS} × a decode step alone, at least {1e3 * MIN_DEFAULT_TPOT_S:g}ms"
        ),
    )
    policy: str = option(
        DEFAULT_POLICY,
        "--policy",
        f"Scheduling policy, which divides the device: {', '.join(policy_names())}.",
    )
    policy_settings: tuple[str, ...] = option(
        (),
        "--policy-setting",
        "Setting of the policy as KEY=VALUE, such as arrival_share=0.05 (docs/policies.md lists "
        "all); can be given several times.",
        metavar="KEY=VALUE",
        shown="the policy's own",
    )
    max_requests: int = option(
        256, "--max-requests", "Maximum number of sequences that run at once."
    )
    max_queued_requests: int = option(
        2048,
        "--max-queued-requests",
        "Maximum number of requests that wait for their first token; further ones are answered "
        "with 503.",
    )
    max_adapters: int = option(
        64,
        "--max-adapters",
        "Maximum number of adapters on the device; the least recently used one is evicted.",
    )
    max_running_jobs: int = option(
        8,
        "--max-running-jobs",
        "Maximum number of jobs that train at once; others are queued, and tenants take turns.",
    )
    job_timeout_s: float | None = option(
        None,
        "--job-timeout",
        "Maximum run time of a job, such as 2h; it then fails, and its newest checkpoint is kept.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )
    trainable_models: tuple[str, ...] = option(
        (),
        "--trainable-model",
        "Further model that jobs can train, as NAME=MODEL, such as big=path/to/big; its weights "
        "pass through a window of the page pool. Can be given several times.",
        metavar="NAME=MODEL",
        shown="none",
    )
    weight_window_bytes: int | None = option(
        None,
        "--weight-window",
        "Maximum part of the page pool for weights of --trainable-model, such as 2GiB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="what requests leave",
    )
    role: str = option(
        "both",
        "--role",
        "Role of this instance: decode takes long prompts from a prefill instance of the same "
        "model, prefill computes them for decode instances, both does everything itself.",
    )
    prefill_socket: str | None = option(
        None,
        "--prefill-socket",
        "Unix socket on which a prefill instance listens, and decode instances connect.",
        metavar="PATH",
        shown="none",
    )
    prefill_min_tokens: int | None = option(
        None,
        "--prefill-min-tokens",
        "Number of uncached prompt tokens below which a decode instance computes a prompt itself.",
        parse=int,
        metavar="N",
        shown="those for which copying pages is predicted to take longer",
    )

    def check(self) -> None:
        """Check the fields; `EngineConfig` checks those of the engine.

        Raises:
            ValueError: One is out of range; the message names it.
        """
        for name in ("max_running_jobs", "max_adapters", "max_queued_requests"):
            check_whole(name, getattr(self, name), 1)
        check_seconds("job_timeout_s", self.job_timeout_s)
        check_choice("role", self.role, ROLES)
        if self.role == "both" and self.prefill_socket is not None:
            raise ValueError("prefill_socket is for role prefill or decode")
        if self.role != "both" and self.prefill_socket is None:
            raise ValueError(
                f"role {self.role} needs prefill_socket, a path at which the two instances meet"
            )
        if self.prefill_min_tokens is not None:
            if self.role != "decode":
                raise ValueError("prefill_min_tokens is for role decode")
            check_whole("prefill_min_tokens", self.prefill_min_tokens, 1)
