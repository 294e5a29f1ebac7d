"""Modules that an adapter sits at: PEFT's rules for target patterns, on the layers of a model.

Source: the meaning of `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`,
`rank_pattern` and `alpha_pattern` in https://huggingface.co/docs/peft/package_reference/lora.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from coserve.adapters.patterns import check_sizes, compile_pattern
from coserve.errors import AdapterError
from coserve.models.base import Architecture, Part
from coserve.settings import MOST_WHOLE, is_whole, shown

ALL_LINEAR = "all-linear"
_OUTPUT_LAYER = "lm_head"
# Targets that match nothing, in a message.
_MAX_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Targets:
    """A choice of modules.

    modules: a collection of names, each the end of a module's dotted name; a regular expression for
        the whole name; or "all-linear": every linear layer but the output layer.
    exclude: likewise (without "all-linear"), taken away. layers, layers_pattern: with a collection
    of names, only in blocks of these indices; the pattern names the list of blocks.
    """

    modules: str | tuple[str, ...]
    """A collection of names, each the end of a module's dotted name; a regular expression for the
    whole name; or "all-linear": every linear layer but the output layer.
    """
    exclude: str | tuple[str, ...] = ()
    """Modules that are taken away: names or a regular expression."""
    layers: int | tuple[int, ...] | None = None
    """Indices of the blocks to which a collection of names is limited; None: all."""
    layers_pattern: str | tuple[str, ...] | None = None
    """Name of the list of blocks."""

    def __post_init__(self) -> None:
        named = (("target_modules", self.modules), ("exclude_modules", self.exclude))
        for setting, value in (*named, ("layers_pattern", self.layers_pattern or "")):
            _check_strings(setting, value)
        if not isinstance(self._layers, tuple) or not all(
            is_whole(layer, 0, MOST_WHOLE) for layer in self._layers
        ):
            raise ValueError(f"layers_to_transform must be whole numbers, not {shown(self.layers)}")
        check_sizes("layers_to_transform", map(str, self._layers))
        self._included, self._excluded, self._blocks  # noqa: B018 (they check themselves)
        if not self.modules:
            raise ValueError("target_modules is empty; name at least one module, or all-linear")
        if isinstance(self.modules, str) and self._layers:
            raise ValueError("layers_to_transform needs target_modules as a list of names")
        if self.layers_pattern and not self._layers:
            raise ValueError("layers_pattern needs layers_to_transform")

    def sites(
        self,
        known: Mapping[str, tuple[Part, str]],
        architecture: Architecture,
        *,
        every_target: bool,
    ) -> dict[str, tuple[Part, str]]:
        """Return (part, node) of the chosen modules, by full module name.

        Args:
            known: the modules to choose from.
            every_target: whether every name must match something (a typo should fail), or just one
                of them (PEFT's rule).

        Raises:
            AdapterError: nothing matches, or too little.
        """
        if self.is_all_linear:
            known = architecture.linear_sites
        found = {module: site for module, site in known.items() if self.chooses(module)}
        listed = () if isinstance(self.modules, str) else self.modules
        ends = {end for module in known for end in _ends(module)}
        names = [name for name in listed if name not in ends]
        if not found or (names and every_target):
            raise AdapterError(self._nothing_matches(architecture, names))
        return found

    def _nothing_matches(self, architecture: Architecture, names: Sequence[str]) -> str:
        wrong = ", ".join(shown(name) for name in names[:_MAX_NAMED]) or shown(self.modules)
        linear = architecture.linear_sites
        if not names and not isinstance(self.modules, str):
            return (
                f"exclude_modules and layers_to_transform leave nothing of target_modules {wrong}"
            )
        known = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in linear))
        family, rule = architecture.config.model_type, ""
        if isinstance(self.modules, str):
            rule = f"; a regular expression matches whole names, such as {next(iter(linear))}"
        return (
            f"target_modules {wrong} matches no linear layer of this {family}; it has {known}{rule}"
        )

    @property
    def is_all_linear(self) -> bool:
        """Return whether they are all linear layers, whatever else there is to choose from."""
        return isinstance(self.modules, str) and self.modules.lower() == ALL_LINEAR

    def chooses(self, module: str) -> bool:
        """Return whether a module of this full name is chosen."""
        if self._excluded is not None:
            if self._excluded.fullmatch(module):
                return False
        elif not self._excluded_names.isdisjoint(_ends(module)):
            return False
        if isinstance(self.modules, str):
            if self.is_all_linear:
                return module != _OUTPUT_LAYER
            return self._included.fullmatch(module) is not None
        if module in self._names:  # PEFT: a whole name is taken at its word
            return True
        chosen = not self._names.isdisjoint(_ends(module))
        return chosen and (not self._layers or self._layer(module) in self._layers)

    @cached_property
    def _included(self) -> Any:
        return (
            compile_pattern("target_modules", self.modules)
            if isinstance(self.modules, str)
            else None
        )

    @cached_property
    def _excluded(self) -> Any:
        return (
            compile_pattern("exclude_modules", self.exclude)
            if isinstance(self.exclude, str)
            else None
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(() if isinstance(self.modules, str) else self.modules)

    @cached_property
    def _excluded_names(self) -> frozenset[str]:
        return frozenset(() if isinstance(self.exclude, str) else self.exclude)

    @property
    def _layers(self) -> tuple[int, ...]:
        """Return the indices of blocks; none means every block (PEFT)."""
        return (
            ()
            if self.layers is None
            else self.layers
            if isinstance(self.layers, tuple)
            else (self.layers,)
        )

    @cached_property
    def _blocks(self) -> list[Any]:
        """Return patterns that find the index of a module's block in its name. The first that
        matches counts.
        """
        given = (
            (self.layers_pattern,) if isinstance(self.layers_pattern, str) else self.layers_pattern
        )
        within = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
        found = [
            compile_pattern("layers_pattern", each, within=within, captures=True)
            for each in given or ()
        ]
        return found or [
            compile_pattern("layers_pattern", r".*?\.[^.]*\.(?P<idx>\d+)\.", captures=True)
        ]

    def _layer(self, module: str) -> int | None:
        found = next((match for each in self._blocks if (match := each.match(module))), None)
        index = None if found is None else found["idx"]
        return None if index is None else int(index)


def _check_strings(setting: str, value: object) -> None:
    """Raise ValueError unless it is a string or several, and not too long."""
    if not isinstance(value, str) and not (
        isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    ):
        raise ValueError(f"{setting} must be a string or a list of strings, not {shown(value)}")
    if isinstance(value, tuple):
        check_sizes(setting, value)


def _ends(module: str) -> Iterator[str]:
    """Yield the names that a target may have for a module: its own, and every end of it after a
    dot.
    """
    parts = reversed(module.split("."))
    return accumulate(parts, lambda end, part: f"{part}.{end}")
