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
        for setting, value in (("target_modules", self.modules), ("exclude_modules", self.exclude)):
            _check_strings(setting, value)
            if isinstance(value, str):
                check_pattern(setting, value)
        if self.layers_pattern is not None:
            _check_strings("layers_pattern", self.layers_pattern)
        if not all(isinstance(layer, int) for layer in self._layers):
            raise ValueError(f"layers_to_transform must be whole numbers, not {self.layers!r}")
        for pattern in self._layers_patterns:
            check_pattern("layers_pattern", pattern)
        if not self.modules:
            raise ValueError("target_modules is empty; name at least one module, or all-linear")
        if isinstance(self.modules, str) and self._layers:
            raise ValueError("layers_to_transform needs target_modules as a list of names")
        if self.layers_pattern and not self._layers:
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
            raise AdapterError(self._nothing_matches(architecture, names))
        return found

    def _nothing_matches(self, architecture: Architecture, names: Collection[str]) -> str:
        wrong = ", ".join(repr(name) for name in names) or repr(self.modules)
        linear = architecture.linear_sites
        if not names and not isinstance(self.modules, str):
            return f"exclude_modules and layers_to_transform leave nothing of target_modules {wrong}"
        known = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in linear))
        family, rule = architecture.config.model_type, ""
        if isinstance(self.modules, str):
            rule = f"; a regular expression matches whole names, such as {next(iter(linear))}"
        return f"target_modules {wrong} matches no linear layer of this {family}; it has {known}{rule}"

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
        if module in self.modules:  # PEFT: a whole name is taken at its word
            return True
        return _ends_with(module, self.modules) and (not self._layers or self._layer(module) in self._layers)

    @property
    def _layers(self) -> tuple[int, ...]:
        """The indices; none means every block (PEFT)."""
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


def _check_strings(setting: str, value: object) -> None:
    """ValueError unless it is a string or several."""
    if not isinstance(value, str) and not (isinstance(value, tuple) and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{setting} must be a string or a list of strings, not {value!r}")


def _ends_with(module: str, names: Collection[str]) -> bool:
    return module in names or any(module.endswith(f".{name}") for name in names)
