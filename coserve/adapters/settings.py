"""Bases of methods' configs: settings under PEFT's names, and modules that PEFT's target patterns
choose.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coserve.adapters.base import PEFT_PREFIX, AdapterConfig
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.patterns import check_sizes
from coserve.adapters.places import Place, Site
from coserve.adapters.targets import Targets
from coserve.adapters.whole_modules import (
    PREFIX,
    is_left_out,
    is_whole,
    whole_bypass,
    whole_initial,
    whole_sites,
)
from coserve.errors import AdapterError
from coserve.graph.bypass import Bypass
from coserve.models.base import Architecture, Part
from coserve.settings import shown

# Fields of PEFT's configurations that say nothing about the numbers of a trained adapter.
_HARMLESS = frozenset(
    (
        *(
            "peft_type",
            "task_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
        ),
        *("inference_mode", "runtime_config"),
        # whether weights are [in, out], which PEFT decides by the module's class in any case
        "fan_in_fan_out",
    )
)
_NOTHING: tuple[Any, ...] = (None, False, {}, [], "none")


class NamedConfig(AdapterConfig):
    """A dataclass whose settings PEFT has under names of its own."""

    peft_names: ClassVar[Mapping[str, str]]
    """PEFT's field by setting."""
    constants: ClassVar[Mapping[str, Any]] = {}
    """Other fields of PEFT's, each with the value that is supported."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that do not change the numbers."""
    required: ClassVar[tuple[str, ...]] = ()
    """Settings that PEFT's file must have."""
    supported: ClassVar[str]
    """The supported part of the method, for messages."""

    def to_peft(self) -> dict[str, Any]:
        return {
            "peft_type": self.peft_type,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            **self.constants,
            **{field: self._plain(setting) for setting, field in self.peft_names.items()},
        }

    @classmethod
    def from_peft(cls, fields: Mapping[str, Any]) -> Self:
        known = _HARMLESS | cls.harmless | set(cls.peft_names.values())
        unsupported = [
            name
            for name, value in fields.items()
            if name not in known and value not in _NOTHING and value != cls.constants.get(name)
        ]
        given = {
            setting: fields[field]
            for setting, field in cls.peft_names.items()
            if fields.get(field) is not None
        }
        if wrong := [*unsupported, *cls.not_supported(given)]:
            used = ", ".join(f"{name}={shown(fields[name])}" for name in wrong)
            raise AdapterError(
                f"the adapter uses {used}, which is not supported; supported is {cls.supported}"
            )
        if missing := [cls.peft_names[setting] for setting in cls.required if setting not in given]:
            raise AdapterError(f"the adapter's config lacks {missing[0]!r}")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise AdapterError(f"the adapter's config is not valid: {error}") from None

    def _plain(self, setting: str) -> Any:
        """Return a setting as JSON has it; PEFT writes its default of several names as null."""
        value = getattr(self, setting)
        if isinstance(value, tuple):
            return list(value) if value or getattr(type(self), setting, ()) else None
        return dict(value) if isinstance(value, Mapping) else value

    @classmethod
    def not_supported(cls, settings: dict[str, Any]) -> list[str]:
        """Return the settings of a directory that are not supported, by PEFT's names. May change
        those that are supported in another form.
        """
        return []


@dataclass(frozen=True, kw_only=True)
class TargetedConfig(NamedConfig):
    """A method at linear layers, with other modules that are trained as a whole."""

    target_names: ClassVar[Mapping[str, str]] = {
        name: name
        for name in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    }
    """PEFT's field by setting, for the choice of targets."""
    whole_names: ClassVar[Mapping[str, str]] = {"modules_to_save": "modules_to_save"}
    """PEFT's field by setting, for modules that are trained as a whole."""
    required: ClassVar[tuple[str, ...]] = ("target_modules",)

    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that the method sits at; see `Targets`."""
    exclude_modules: str | tuple[str, ...] = ()
    """Modules among these that are left out; see `Targets`."""
    layers_to_transform: int | tuple[int, ...] | None = None
    """Indices of the blocks that targets are chosen from; see `Targets`."""
    layers_pattern: str | tuple[str, ...] | None = None
    """Name of the list of blocks; see `Targets`."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained as a whole, such as embed_tokens and lm_head, by
    PEFT's rule (`is_whole`).
    """

    def __post_init__(self) -> None:
        for setting in TargetedConfig.target_names:
            if isinstance(
                value := getattr(self, setting), list | set
            ):  # from JSON, or as PEFT has them
                object.__setattr__(self, setting, tuple(value))
        whole = self.modules_to_save
        object.__setattr__(
            self, "modules_to_save", tuple(whole) if isinstance(whole, list | set) else whole or ()
        )
        if not isinstance(self.modules_to_save, tuple) or not all(
            isinstance(each, str) for each in self.modules_to_save
        ):
            raise ValueError(f"modules_to_save must be a list of names, not {shown(whole)}")
        check_sizes("modules_to_save", self.modules_to_save)
        for setting, nothing in (("exclude_modules", ()), ("layers_pattern", None)):
            if not getattr(self, setting):
                object.__setattr__(self, setting, nothing)
        for setting in TargetedConfig.target_names:
            if setting not in self.target_names and getattr(self, setting) not in ((), None):
                raise ValueError(
                    f"{self.peft_type} has no {setting}; write target_modules as a regular "
                    f"expression"
                )
        self._targets  # noqa: B018 (it checks itself)

    @cached_property
    def _targets(self) -> Targets:
        return Targets(
            modules=self.target_modules,
            exclude=self.exclude_modules,
            layers=self.layers_to_transform,
            layers_pattern=self.layers_pattern,
        )

    def sites(
        self, architecture: Architecture, *, every_target: bool = True
    ) -> dict[str, tuple[Part, str]]:
        names = self.whole_names_of(architecture)
        whole = whole_sites(architecture, names)
        if missing := [
            name
            for name in names
            if every_target and not any(is_whole(each, (name,)) for each in whole)
        ]:
            family = architecture.config.model_type
            known = f"{architecture.embedding_name.rpartition('.')[2]}, lm_head, norms"
            raise AdapterError(
                f"modules_to_save {', '.join(missing)} matches no module with weights of this "
                f"{family}; it has {known}"
            )
        targets = self.target_sites(architecture, every_target=every_target)
        if both := [module for module in targets if module in whole]:
            raise AdapterError(
                f"modules_to_save and target_modules both mean {both[0]}: name it in one of them"
            )
        return {**targets, **whole}

    def target_sites(
        self, architecture: Architecture, *, every_target: bool
    ) -> dict[str, tuple[Part, str]]:
        """Return (part, node) of the modules that the targets choose, by full module name."""
        whole = self.whole_names_of(architecture)
        found = self._targets.sites(
            self.can_be_targets(architecture), architecture, every_target=every_target
        )
        return {module: site for module, site in found.items() if not is_left_out(module, whole)}

    def can_be_targets(self, architecture: Architecture) -> Mapping[str, tuple[Part, str]]:
        """Return (part, node) of the modules that targets may choose from, by full module name."""
        return architecture.linear_sites

    def whole_names_of(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the names in `modules_to_save` for a model."""
        return self.modules_to_save

    def is_whole_at(self, place: Place) -> bool:
        """Return whether the module at a place is trained as a whole."""
        return is_whole(place.module, self.whole_names_of(place.architecture))

    def bypass(self, place: Place, *, training: bool) -> Bypass:
        return (
            whole_bypass(place)
            if self.is_whole_at(place)
            else self.target_bypass(place, training=training)
        )

    def initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        if parameter.startswith(PREFIX):
            return whole_initial(parameter, site)
        return self.target_initial(parameter, shape, site, generator)

    def merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.is_whole_at(site.place):
            return {name.removeprefix(PREFIX): value for name, value in parameters.items()}
        return self.target_merged(site, parameters)

    def target_merged(self, site: Site, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what `merged` does, at a target."""
        return super().merged(site, parameters)

    @abstractmethod
    def target_bypass(self, place: Place, *, training: bool) -> Bypass:
        """Return what `bypass` does, at a target."""

    @abstractmethod
    def target_initial(
        self, parameter: str, shape: tuple[int, ...], site: Site, generator: torch.Generator
    ) -> Tensor:
        """Return what `initial` does, for a parameter at a target."""

    def file_name(self, name: str) -> str:
        """Return the name of a parameter in PEFT's file, by its full name."""
        return PEFT_PREFIX + name.replace(f".{PREFIX}", ".")

    def frozen_file_name(self, module: str, architecture: Architecture) -> str:
        is_target = module in self.target_sites(architecture, every_target=False)
        return f"{PEFT_PREFIX}{module}.{'base_layer.' if is_target else ''}weight"

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        found = {
            self.file_name(name): self.to_peft_value(layout.local_names[name], value)
            for name, value in values.items()
        }
        # PEFT writes a head that is trained as one with the embeddings once more.
        twice = {name: owner for name, owner in layout.shared.items() if f".{PREFIX}" in name}
        return found | {self.file_name(name): values[owner] for name, owner in twice.items()}

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        return {
            name: self.from_peft_value(local, tensors[self.file_name(name)])
            for name, local in layout.local_names.items()
        }


def check_flags(config: AdapterConfig, *names: str) -> None:
    """Raise ValueError unless these settings are true or false."""
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise ValueError(f"{name} must be true or false, not {shown(value)}")
