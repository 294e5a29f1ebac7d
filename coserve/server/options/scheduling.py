"""Memory, SLOs, the policy, and how much runs at once."""

from dataclasses import dataclass

from coserve.handover.roles import ROLES
from coserve.scheduling.policies import DEFAULT_POLICY, policy_names
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, LEAST_DEFAULT_TPOT_S
from coserve.server.options.option import OptionGroup, check_choice, check_seconds, option
from coserve.server.units import bytes_of, seconds_of, slo_seconds
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions(OptionGroup):
    """What requests and jobs may take, and who decides."""

    memory_bytes: int | None = option(
        None,
        "--memory",
        "Of the page pool, for keys and values of requests and activations of jobs, such as 4GiB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="a share of what is free",
    )
    host_memory_bytes: int = option(
        0,
        "--host-memory",
        "For what requests and jobs that make room have computed, such as 8GiB; without, it is "
        "computed again.",
        parse=bytes_of,
        metavar="SIZE",
        shown="none",
    )
    ttft_s: float = option(
        2.0,
        "--slo-ttft",
        "SLO: time to the first token, such as 500ms or 2s.",
        parse=slo_seconds,
        metavar="TIME",
        shown="2s",
    )
    tpot_s: float | None = option(
        None,
        "--slo-tpot",
        "SLO: mean time per later token, such as 40ms or 0.04s.",
        parse=slo_seconds,
        metavar="TIME",
        shown=(
            f"{DEFAULT_TPOT_STEPS} × a decode step alone, at least {1e3 * LEAST_DEFAULT_TPOT_S:g}ms"
        ),
    )
    policy: str = option(
        DEFAULT_POLICY, "--policy", f"Who gets the device: {', '.join(policy_names())}."
    )
    policy_settings: tuple[str, ...] = option(
        (),
        "--policy-setting",
        "KEY=VALUE of the policy, such as arrival_share=0.05 (docs/policies.md has all); may be "
        "given several times.",
        metavar="KEY=VALUE",
        shown="the policy's own",
    )
    max_requests: int = option(256, "--max-requests", "Sequences that run at once.")
    max_queued_requests: int = option(
        2048,
        "--max-queued-requests",
        "Requests that wait for their first token; more are answered with 503.",
    )
    max_adapters: int = option(
        64, "--max-adapters", "Adapters on the device; the least used ones make room."
    )
    max_running_jobs: int = option(
        8,
        "--max-running-jobs",
        "Jobs that train at once; the others are queued, and tenants take turns.",
    )
    job_timeout_s: float | None = option(
        None,
        "--job-timeout",
        "How long a job may run, such as 2h; then it fails, and its newest checkpoint is kept.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )
    trainable_models: tuple[str, ...] = option(
        (),
        "--trainable-model",
        "NAME=MODEL that jobs may train beside the one that serves, such as big=path/to/big; its "
        "weights pass through "
        "a window of the page pool. May be given several times.",
        metavar="NAME=MODEL",
        shown="none",
    )
    weight_window_bytes: int | None = option(
        None,
        "--weight-window",
        "Of the page pool, that weights of --trainable-model may take at once, such as 2GiB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="what requests leave",
    )
    role: str = option(
        "both",
        "--role",
        "Of an instance: decode has long prompts computed by another one of the same model, "
        "prefill computes them for "
        "such instances, both does all by itself.",
    )
    prefill_socket: str | None = option(
        None,
        "--prefill-socket",
        "Unix socket at which a prefill instance listens, and where decode instances find it.",
        metavar="PATH",
        shown="none",
    )
    prefill_min_tokens: int | None = option(
        None,
        "--prefill-min-tokens",
        "A decode instance computes prompts itself that have fewer unknown tokens.",
        parse=int,
        metavar="N",
        shown="those for which copying pages is predicted to take longer",
    )

    def check(self) -> None:
        """ValueError names the field and its range; what is the engine's is checked by
        `EngineConfig`.
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
