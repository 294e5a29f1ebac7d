"""What a policy is: a pure function from a view to a plan, with settings of its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.history import History
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.settings import is_number

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Setting(NamedTuple):
    """What there is to know about a setting. least, most: its range, both included."""

    name: str
    default: float | bool
    least: float
    most: float
    help: str


def setting(default: float | bool, help: str, *, least: float = 0.0, most: float = inf) -> Any:
    """A field of a policy: a number in a range, a whole number if the default is one, or a truth value."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A policy is a subclass in a file of its own in this folder, found by the file's name. Its fields are `setting`s.

    `plan` reads no clock, does no I/O and keeps nothing between calls: the same view and latency model give the same
    plan. What it must know of earlier steps is in a `History`. ValueError when created names a setting and its range.
    """

    summary: ClassVar[str]  # one line, for help texts

    @abstractmethod
    def plan(self, view: View, latency: LatencyModel) -> Plan:
        """What the engine does next."""

    def make_history(self) -> History | None:
        """What the engine is to remember of steps, for `View.history`; None: nothing."""
        return None

    @property
    def token_weights(self) -> TokenWeights:
        """What tokens cost tenants, for the engine's counters."""
        return TokenWeights()

    def __post_init__(self) -> None:
        for one in self.settings():
            _check(one, getattr(self, one.name))

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """All that can be set."""
        return tuple(_setting_of(one) for one in fields(cls))

    @classmethod
    def from_settings(cls, name: str, given: Mapping[str, Any]) -> Self:
        """With settings by name, as values or as text (as on a command line).

        Raises:
            ValueError: there is no such setting (then it lists those that there are), or its value is out of range.
        """
        known = {one.name: one for one in cls.settings()}
        if unknown := [key for key in given if key not in known]:
            have = f"its settings are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {name!r} has no setting {unknown[0]!r}; {have}")
        return cls(
            **{key: _parse(known[key], value) if isinstance(value, str) else value for key, value in given.items()}
        )


def _setting_of(one: "Field[Any]") -> Setting:
    default: Any = one.default
    return Setting(name=one.name, default=default, **one.metadata)


def _parse(one: Setting, text: str) -> Any:
    """A value from text; text that says none stays as it is, for `_check` to name."""
    if isinstance(one.default, bool):
        return _TRUTHS.get(text.strip().lower(), text)
    try:
        return int(text) if isinstance(one.default, int) else float(text)
    except ValueError:
        return text


def _check(one: Setting, value: Any) -> None:
    """ValueError unless it is a value that the setting can have."""
    if isinstance(one.default, bool):
        kind, right = "true or false", isinstance(value, bool)
    else:
        whole = isinstance(one.default, int)
        bounds = f"of at least {one.least:g}" if one.most == inf else f"from {one.least:g} to {one.most:g}"
        kind = f"a {'whole ' * whole}number {bounds}"
        right = is_number(value) and one.least <= value <= one.most and (isinstance(value, int) or not whole)
    if not right:
        raise ValueError(f"setting {one.name} must be {kind}, not {value!r}")
