"""How a server is set up. The options of `coserve up` are these fields: all that is to say of one stands here once."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from coserve.engine.config import EngineConfig
from coserve.home import home_directory
from coserve.scheduling.policies import DEFAULT_POLICY, policy_names
from coserve.scheduling.slo import DEFAULT_TPOT_STEPS, LEAST_DEFAULT_TPOT_S
from coserve.settings import check_whole, is_number

_UNITS = {"": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}
# The tenant of a server without keys.
DEFAULT_TENANT = "default"


def bytes_of(text: str) -> int:
    """A number of bytes such as 512MB, 4GiB or 1000000."""
    number, unit = _number_and_unit(text)
    name = unit.removesuffix("b") if unit != "b" else unit
    if name not in _UNITS:
        raise ValueError(f"{text!r} is no size; give one such as 512MB or 4GiB")
    return int(number * _UNITS[name])


def seconds_of(text: str) -> float:
    """A duration such as 40ms, 2s, or 0.5."""
    number, unit = _number_and_unit(text)
    if unit not in _DURATIONS:
        raise ValueError(f"{text!r} is no duration; give one such as 40ms or 2s")
    return number * _DURATIONS[unit]


def objective_of(text: str) -> float:
    """A duration with its unit: milliseconds are usual here, so a bare number would be taken for seconds by mistake."""
    number, unit = _number_and_unit(text)
    if not unit:
        raise ValueError(f"{text!r} has no unit; give {number:g}ms (which is {number / 1e3:g}s), or {number:g}s")
    return seconds_of(text)


def _number_and_unit(text: str) -> tuple[float, str]:
    if (found := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text.strip())) is None:
        raise ValueError(f"{text!r} is no number with a unit")
    return float(found[1]), found[2].lower()


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a field looks on the command line. option: its name ("" for the positional argument). parse: from text, with
    metavar for what the text says.
    """

    option: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    shown: str | None = None


def _option(default: Any, option: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(option=option, help=help, **more)})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """ValueError when created names the field and its range."""

    model: str = _option("tiny", "", "A directory in Hugging Face's layout, a hub id, or the built-in model, tiny.")
    host: str = _option("127.0.0.1", "--host", "Address to listen at; 0.0.0.0 for every network (think of --api-key).")
    port: int = _option(8000, "--port", "Port to listen at; 0 for any that is free.")
    dtype: str = _option("auto", "--dtype", "float32, bfloat16, float16, or auto: the model's own.")
    weights: str = _option(
        "dense", "--weights", "How weights of linear layers are stored: dense, or int8 (half the bytes of bfloat16)."
    )
    device: str = _option("auto", "--device", "Such as cpu or cuda:0; auto takes a GPU if there is one.")
    memory_bytes: int | None = _option(
        None,
        "--memory",
        "Of the page pool, for keys and values of requests and activations of jobs, such as 4GiB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="a share of what is free",
    )
    ttft_s: float = _option(
        2.0,
        "--slo-ttft",
        "SLO: time to the first token, such as 500ms or 2s.",
        parse=objective_of,
        metavar="TIME",
        shown="2s",
    )
    tpot_s: float | None = _option(
        None,
        "--slo-tpot",
        "SLO: mean time per later token, such as 40ms or 0.04s.",
        parse=objective_of,
        metavar="TIME",
        shown=f"{DEFAULT_TPOT_STEPS} × a decode step alone, at least {1e3 * LEAST_DEFAULT_TPOT_S:g}ms",
    )
    policy: str = _option(DEFAULT_POLICY, "--policy", f"Who gets the device: {', '.join(policy_names())}.")
    policy_settings: tuple[str, ...] = _option(
        (),
        "--policy-setting",
        "KEY=VALUE of the policy, such as arrival_share=0.05 (docs/engine.md has all); may be given several times.",
        metavar="KEY=VALUE",
        shown="the policy's own",
    )
    threads: int | None = _option(
        None,
        "--threads",
        "Of the CPU, for the engine's arithmetic.",
        parse=int,
        metavar="N",
        shown="one for a small model, all for others",
    )
    max_requests: int = _option(256, "--max-requests", "Sequences that run at once.")
    max_adapters: int = _option(64, "--max-adapters", "Adapters on the device; the least used ones make room.")
    api_keys: tuple[str, ...] = _option(
        (),
        "--api-key",
        "KEY or TENANT=KEY that clients must bring; may be given several times.",
        metavar="KEY",
        shown="none needed",
    )
    allow_adapter_paths: tuple[Path, ...] = _option(
        (),
        "--allow-adapter-paths",
        "Directory below which /v1/load_lora_adapter may read; may be given several times.",
        metavar="DIR",
        shown="nothing is read",
    )
    home: str | None = _option(
        None,
        "--home",
        "Where files, jobs and adapters live.",
        metavar="DIR",
        shown="$COSERVE_HOME or ~/.coserve",
    )
    database: str | None = _option(
        None, "--database", "Where files and jobs are recorded: any URL of SQLAlchemy.", shown="SQLite in --home"
    )
    max_upload_bytes: int = _option(
        512 * 10**6, "--max-upload", "Of a file.", parse=bytes_of, metavar="SIZE", shown="512MB"
    )
    max_body_bytes: int = _option(
        32 * 10**6, "--max-body", "Of any other request.", parse=bytes_of, metavar="SIZE", shown="32MB"
    )
    record: str | None = _option(
        None,
        "--record",
        "Write all that the engine is asked and does to this file, for coserve replay.",
        shown="nothing",
    )
    drain_s: float = _option(
        30.0,
        "--drain",
        "How long open streams may take at the end, such as 30s or 2min.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )

    def __post_init__(self) -> None:
        check_whole("port", self.port, 0, 65535)
        for name in ("max_adapters", "max_body_bytes", "max_upload_bytes"):
            check_whole(name, getattr(self, name), 1)
        if self.threads is not None:
            check_whole("threads", self.threads, 1)
        if not is_number(self.drain_s) or self.drain_s < 0:
            raise ValueError(f"drain_s must be a number of seconds, 0 or more, not {self.drain_s!r}")
        if len(self.tenants) != len(self.api_keys):
            raise ValueError("api_keys must differ from one another")
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
        """Tenants by key; empty if no key is needed. A key without a name gives its tenant one that does not tell the
        key.
        """
        found = {}
        for given in self.api_keys:
            if not given:
                raise ValueError("api_keys must be KEY or TENANT=KEY, and no key may be empty")
            named = re.fullmatch(r"([\w.-]{1,64})=([^=].*)", given)
            name, key = named.groups() if named else (f"key-{hashlib.sha256(given.encode()).hexdigest()[:8]}", given)
            found[key] = name
        return found


def _settings_of(given: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE texts by key."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not key or not equals]:
        raise ValueError(f"policy_settings are KEY=VALUE, not {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def option_of(one: "Field[Any]") -> Option:
    """How a field looks on the command line."""
    option: Option = one.metadata["option"]
    return option
