"""Which modules an adapter sits at: PEFT's rules for target patterns, on the linear layers of a model.

Source: the meaning of `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `rank_pattern`
and `alpha_pattern` in https://huggingface.co/docs/peft/package_reference/lora.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from coserve.errors import AdapterError
from coserve.models.base import Architecture, Part

ALL_LINEAR = "all-linear"
_OUTPUT_LAYER = "lm_head"
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """A choice of modules.

    modules: a collection of names, each the end of a module's dotted name; a regular expression for the whole name;
        or "all-linear": every linear layer but the output layer.
    exclude: likewise (without "all-linear"), taken away.
    layers, layers_pattern: with a collection of names, only in blocks of these indices; the pattern names the list of
    blocks.
    """

    modules: str | tuple[str, ...]
    exclude: str | tuple[str, ...] = ()
    layers: int | tuple[int, ...] | None = None
    layers_pattern: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for setting in ("modules", "exclude"):
            if isinstance(pattern := getattr(self, setting), str):
                check_pattern(setting, pattern)
        for pattern in self._layers_patterns:
            check_pattern("layers_pattern", pattern)
        if not self.modules:
            raise ValueError("target_modules is empty; name at least one module, or all-linear")
        if isinstance(self.modules, str) and self.layers is not None:
            raise ValueError("layers_to_transform needs target_modules as a list of names")
        if self.layers_pattern and self.layers is None:
            raise ValueError("layers_pattern needs layers_to_transform")

    def sites(self, architecture: Architecture, *, every_target: bool) -> dict[str, tuple[Part, str]]:
        """Full module name -> (part, node) of the linear layers chosen.

        every_target: whether every name must match something (a typo should fail), or just one of them (PEFT's rule).

        Raises:
            AdapterError: nothing matches, or too little.
        """
        linear = architecture.linear_sites
        found = {module: site for module, site in linear.items() if self._matches(module)}
        listed = () if isinstance(self.modules, str) else self.modules
        names = [name for name in listed if not any(_ends_with(module, (name,)) for module in linear)]
        if not found or (names and every_target):
            wrong = ", ".join(repr(name) for name in names) or repr(self.modules)
            known = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in linear))
            family = architecture.config.model_type
            raise AdapterError(f"target_modules {wrong} matches no linear layer of this {family}; it has {known}")
        return found

    def _matches(self, module: str) -> bool:
        if isinstance(self.exclude, str):
            if re.fullmatch(self.exclude, module):
                return False
        elif _ends_with(module, self.exclude):
            return False
        if isinstance(self.modules, str):
            if self.modules.lower() == ALL_LINEAR:
                return module != _OUTPUT_LAYER
            return re.fullmatch(self.modules, module) is not None
        return _ends_with(module, self.modules) and (self.layers is None or self._layer(module) in self._layers)

    @property
    def _layers(self) -> tuple[int, ...]:
        return (self.layers,) if isinstance(self.layers, int) else self.layers or ()

    @property
    def _layers_patterns(self) -> tuple[str, ...]:
        return (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern or ()

    def _layer(self, module: str) -> int | None:
        expressions = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in self._layers_patterns]
        for expression in expressions or [r".*?\.[^.]*\.(?P<index>\d+)\."]:
            if match := re.match(expression, module):
                return int(match["index"])
        return None


def by_pattern(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """The value of the first pattern that matches the end of a module's name (PEFT's rank_pattern and
    alpha_pattern).
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def check_pattern(setting: str, pattern: str) -> None:
    """ValueError if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{setting} {pattern!r} is no regular expression: {error}") from None


def _ends_with(module: str, names: Collection[str]) -> bool:
    return module in names or any(module.endswith(f".{name}") for name in names)
