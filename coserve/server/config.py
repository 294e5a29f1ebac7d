"""How a server is set up. The options of `coserve up` are these fields: all that is to say of one stands here once."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from coserve.engine.config import EngineConfig
from coserve.handover.roles import ROLES
from coserve.home import home_directory
from coserve.logs import FORMATS, LEVELS
from coserve.scheduling.policies import DEFAULT_POLICY, policy_names
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, LEAST_DEFAULT_TPOT_S
from coserve.server.hosts import check_hosts
from coserve.server.keys import tenant_and_digest
from coserve.server.limits import Limits
from coserve.server.options import option
from coserve.server.tool_parsers import parser_class, parser_names
from coserve.server.units import bytes_of, seconds_of, slo_seconds
from coserve.settings import check_whole, is_number


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """ValueError when created names the field and its range."""

    model: str = option("tiny", "", "A directory in Hugging Face's layout, a hub id, or the built-in model, tiny.")
    served_model_names: tuple[str, ...] = option(
        (),
        "--served-model-name",
        "What clients call the model; may be given several times: the first is shown, and begins the names of "
        "fine-tuned models.",
        metavar="NAME",
        shown="MODEL; of a directory, its own name",
    )
    max_model_len: int | None = option(
        None,
        "--max-model-len",
        "Tokens of a prompt and its answer together.",
        parse=int,
        metavar="N",
        shown="what the model and the pool allow",
    )
    host: str = option("127.0.0.1", "--host", "Address to listen at; 0.0.0.0 for every network (think of --api-key).")
    port: int = option(8000, "--port", "Port to listen at; 0 for any that is free.")
    dtype: str = option("auto", "--dtype", "float32, bfloat16, float16, or auto: the model's own.")
    weights: str = option(
        "dense",
        "--weights",
        "How weights of linear layers are stored: dense, or such as int8 (docs/kernels.md has all).",
    )
    device: str = option("auto", "--device", "Such as cpu or cuda:0; auto takes a GPU if there is one.")
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
        "For what requests and jobs that make room have computed, such as 8GiB; without, it is computed again.",
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
        shown=f"{DEFAULT_TPOT_STEPS} × a decode step alone, at least {1e3 * LEAST_DEFAULT_TPOT_S:g}ms",
    )
    policy: str = option(DEFAULT_POLICY, "--policy", f"Who gets the device: {', '.join(policy_names())}.")
    policy_settings: tuple[str, ...] = option(
        (),
        "--policy-setting",
        "KEY=VALUE of the policy, such as arrival_share=0.05 (docs/policies.md has all); may be given several times.",
        metavar="KEY=VALUE",
        shown="the policy's own",
    )
    threads: int | None = option(
        None,
        "--threads",
        "Of the CPU, for the engine's arithmetic.",
        parse=int,
        metavar="N",
        shown="one for a small model, all for others",
    )
    deterministic: bool = option(
        False,
        "--deterministic",
        "Answers and adapters are the same bit for bit, whatever runs beside them; steps take longer.",
    )
    tool_call_parser: str = option(
        "auto",
        "--tool-call-parser",
        f"How the model writes calls of tools: {', '.join(parser_names())}; auto: as its chat template does.",
    )
    generation_config: str = option(
        "auto",
        "--generation-config",
        "Where temperature, top_k, top_p, min_p and repetition_penalty come from that a request does not say: auto, "
        "the model's generation_config.json; none; or a directory with another.",
    )
    role: str = option(
        "both",
        "--role",
        "Of an instance: decode has long prompts computed by another one of the same model, prefill computes them for "
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
    max_requests: int = option(256, "--max-requests", "Sequences that run at once.")
    max_adapters: int = option(64, "--max-adapters", "Adapters on the device; the least used ones make room.")
    max_running_jobs: int = option(
        8, "--max-running-jobs", "Jobs that train at once; the others are queued, and tenants take turns."
    )
    job_timeout_s: float | None = option(
        None,
        "--job-timeout",
        "How long a job may run, such as 2h; then it fails, and its newest checkpoint is kept.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "--api-key",
        "KEY or TENANT=KEY that clients must bring; may be given several times. Better --api-keys-file or "
        "COSERVE_API_KEYS: ps shows this one to all users of the machine.",
        metavar="KEY",
        shown="none needed",
    )
    api_keys_file: str | None = option(
        None,
        "--api-keys-file",
        "More keys, by their digests, and limits of tenants; read again on SIGHUP (coserve keys new).",
        metavar="FILE",
        shown="none",
    )
    operators: tuple[str, ...] = option(
        (),
        "--operator",
        "Tenant whose keys see metrics and status of all tenants; may be given several times.",
        metavar="TENANT",
        shown="without keys, all",
    )
    tenant_max_requests: int | None = option(
        None,
        "--tenant-max-requests",
        "Sequences that a tenant may have under way at once.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_tokens_per_minute: int | None = option(
        None,
        "--tenant-tokens-per-minute",
        "Tokens of a tenant's prompts and answers.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_jobs: int | None = option(
        None,
        "--tenant-max-jobs",
        "Jobs of a tenant that have not ended.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_running_jobs: int | None = option(
        None,
        "--tenant-max-running-jobs",
        "Jobs of a tenant that train at once.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_file_bytes: int | None = option(
        None,
        "--tenant-max-files",
        "Of all files of a tenant, such as 10GB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="no limit",
    )
    allow_adapter_paths: tuple[Path, ...] = option(
        (),
        "--allow-adapter-paths",
        "Directory below which /v1/load_lora_adapter may read; may be given several times.",
        metavar="DIR",
        shown="nothing is read",
    )
    home: str | None = option(
        None,
        "--home",
        "Where files, jobs and adapters live.",
        metavar="DIR",
        shown="$COSERVE_HOME or ~/.coserve",
    )
    database: str | None = option(
        None,
        "--database",
        "Where files and jobs are recorded, as SQLAlchemy's URL, such as postgresql://me@host/coserve. One with a "
        "password better in COSERVE_DATABASE: ps shows this one to all users of the machine.",
        metavar="URL",
        shown="$COSERVE_DATABASE or SQLite in --home",
    )
    max_upload_bytes: int = option(
        512 * 10**6, "--max-upload", "Of a file.", parse=bytes_of, metavar="SIZE", shown="512MB"
    )
    max_body_bytes: int = option(
        8 * 10**6,
        "--max-body",
        "Of a completion's request; others may have 1MB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="8MB",
    )
    max_connections: int = option(
        2048, "--max-connections", "Connections at once; the longest idle one makes room for another."
    )
    timeout_headers_s: float = option(
        20.0,
        "--timeout-headers",
        "How long the headers of a request may take to come.",
        parse=seconds_of,
        metavar="TIME",
        shown="20s",
    )
    timeout_body_s: float = option(
        30.0,
        "--timeout-body",
        "How long a body may take to come, unless it comes at 10 kB/s.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )
    timeout_keep_alive_s: float = option(
        # Longer than clients keep an idle connection (httpx: 5 s): one that is closed just as it is used again loses a
        # request.
        75.0,
        "--timeout-keep-alive",
        "How long a connection may be idle after an answer.",
        parse=seconds_of,
        metavar="TIME",
        shown="75s",
    )
    request_timeout_s: float | None = option(
        None,
        "--request-timeout",
        "How long a completion may take from its request to its last token, such as 10min; then it ends with an error.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )
    max_queued_requests: int = option(
        2048, "--max-queued-requests", "Requests that wait for their first token; more are answered with 503."
    )
    ssl_certfile: str | None = option(
        None, "--ssl-certfile", "Certificate chain in PEM's format: serve https.", shown="http"
    )
    ssl_keyfile: str | None = option(None, "--ssl-keyfile", "Its private key.", shown="in --ssl-certfile")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts",
        "Name that requests may call the server by, such as *.example.com, or * for any; may be given several times.",
        metavar="HOST",
        shown="localhost if --host is only this machine's; else any",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origin",
        "Origin whose pages may call the server from a browser, such as https://chat.example.com, or * for any; may be "
        "given several times.",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        "", "--root-path", "Path that a proxy puts before the server's, such as /llm.", metavar="PATH", shown="none"
    )
    log_format: str = option("text", "--log-format", f"Of the lines on stderr: {' or '.join(FORMATS)}.")
    log_level: str = option(
        "warning", "--log-level", f"Least that is logged: {', '.join(LEVELS)}; info has a line for each request."
    )
    otlp_endpoint: str | None = option(
        None,
        "--otlp-endpoint",
        "Send OpenTelemetry traces to the collector at this URL, such as http://localhost:4318 (docs/operations.md).",
        metavar="URL",
        shown="$OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    record: str | None = option(
        None,
        "--record",
        "Write all that the engine is asked and does to this file, for coserve replay.",
        shown="nothing",
    )
    engine_timeout_s: float = option(
        30.0,
        "--engine-timeout",
        "An engine that has not answered for this long is ended and started again; its jobs resume.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )
    drain_s: float = option(
        30.0,
        "--drain",
        "How long open streams may take at the end, such as 30s or 2min.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )

    def __post_init__(self) -> None:
        check_whole("port", self.port, 0, 65535)
        counts = ("max_running_jobs", "max_adapters", "max_connections", "max_queued_requests")
        for name in (*counts, "max_body_bytes", "max_upload_bytes"):
            check_whole(name, getattr(self, name), 1)
        if self.threads is not None:
            check_whole("threads", self.threads, 1)
        if not is_number(self.engine_timeout_s) or self.engine_timeout_s < 2:
            raise ValueError(f"engine_timeout_s must be a number of seconds, 2 or more, not {self.engine_timeout_s!r}")
        if not is_number(self.drain_s) or self.drain_s < 0:
            raise ValueError(f"drain_s must be a number of seconds, 0 or more, not {self.drain_s!r}")
        limits = ("timeout_headers_s", "timeout_body_s", "timeout_keep_alive_s", "request_timeout_s", "job_timeout_s")
        for name in limits:
            value = getattr(self, name)
            if value is not None and (not is_number(value) or value <= 0):
                raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
        for name, allowed in (("role", ROLES), ("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint must be a URL of http or https, not {self.otlp_endpoint!r}")
        if self.database is not None and "://" not in self.database:
            raise ValueError(
                "database must be a URL of SQLAlchemy, such as postgresql://me@host/coserve or sqlite:////DIR/jobs.db, "
                f"not {self.database!r}"
            )
        if self.role == "both" and self.prefill_socket is not None:
            raise ValueError("prefill_socket is for role prefill or decode")
        if self.role != "both" and self.prefill_socket is None:
            raise ValueError(f"role {self.role} needs prefill_socket, a path at which the two instances meet")
        if self.prefill_min_tokens is not None:
            if self.role != "decode":
                raise ValueError("prefill_min_tokens is for role decode")
            check_whole("prefill_min_tokens", self.prefill_min_tokens, 1)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        check_hosts(self.allowed_hosts)
        if any(not name.strip() or "@" in name for name in self.served_model_names):
            raise ValueError("served_model_names must be names without an @, which begins a version")
        if len(set(self.served_model_names)) != len(self.served_model_names):
            raise ValueError("served_model_names must differ from one another")
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 2)
        for origin in self.cors_origins:
            if re.fullmatch(r"\*|https?://[^/\s]+", origin) is None:
                raise ValueError(
                    f"cors_origins must be such as https://chat.example.com, without a path, or *, not {origin!r}"
                )
        if self.root_path and re.fullmatch(r"(/[^/?#\s]+)+", self.root_path) is None:
            raise ValueError(
                f"root_path must be a path such as /llm, without a slash at its end, not {self.root_path!r}"
            )
        if self.tool_call_parser != "auto":
            parser_class(self.tool_call_parser)
        if len(self.tenants) != len(self.api_keys):
            raise ValueError("api_keys must differ from one another")
        # Known by their digests from now on.
        hashed = tuple(f"{tenant}={digest}" for digest, tenant in self.tenants.items())
        object.__setattr__(self, "api_keys", hashed)
        assert self.tenant_limits is not None  # checks them
        assert self.engine is not None  # checks the rest

    @property
    def directory(self) -> Path:
        """`home`, wherever it was said."""
        return home_directory(self.home)

    @property
    def engine(self) -> EngineConfig:
        """The engine's part."""
        names = {each.name for each in fields(EngineConfig)} & {each.name for each in fields(self)}
        given = {name: getattr(self, name) for name in names}
        return EngineConfig(**given | {"policy_settings": _settings_of(self.policy_settings)})

    @property
    def tenants(self) -> dict[str, str]:
        """Tenants by the digests of their keys, of those given here."""
        return {digest: tenant for tenant, digest in map(tenant_and_digest, self.api_keys)}

    @property
    def tenant_limits(self) -> Limits:
        """Of tenants that have none of their own."""
        return Limits(**{each.name: getattr(self, f"tenant_{each.name}") for each in fields(Limits)})


def _settings_of(given: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE texts by key."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not key or not equals]:
        raise ValueError(f"policy_settings must be KEY=VALUE, not {wrong[0]!r}")
    return {key: value for key, _, value in pairs}
