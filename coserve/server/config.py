"""Configuration of a server, whose fields are the options of `coserve up`."""

from dataclasses import dataclass, fields
from typing import Any

from coserve.engine.config import EngineConfig
from coserve.server.options import (
    GROUPS,
    HttpOptions,
    ModelOptions,
    OperationOptions,
    SchedulingOptions,
    TenantOptions,
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ModelOptions, SchedulingOptions, TenantOptions, HttpOptions, OperationOptions):
    """Configuration of a server.

    Raises:
        ValueError: A field is out of its range; the message names the field and the range.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check each group of options, and the engine's configuration that follows from them."""
        for group in GROUPS.values():
            group.check(self)
        # Known by their digests from now on.
        hashed = tuple(f"{tenant}={digest}" for digest, tenant in self.tenants.items())
        object.__setattr__(self, "api_keys", hashed)
        names = list(self.engine.trainable_models)  # which checks the rest
        if len(names) < len(self.trainable_models) or any(
            not name.strip() or "@" in name for name in names
        ):
            raise ValueError(
                "trainable_models must have unique names without an @, which separates name and "
                "version"
            )

    @property
    def engine(self) -> EngineConfig:
        """Configuration of the engine."""
        names = {each.name for each in fields(EngineConfig)} & {each.name for each in fields(self)}
        values = {name: getattr(self, name) for name in names}
        pairs: dict[str, dict[str, Any]] = {
            "policy_settings": _pairs_of("policy_settings", self.policy_settings, "KEY=VALUE"),
            "trainable_models": _pairs_of("trainable_models", self.trainable_models, "NAME=MODEL"),
            "tenant_weights": _weights_of(self.tenant_weights),
        }
        return EngineConfig(**values | pairs)


def _pairs_of(field: str, given: tuple[str, ...], form: str) -> dict[str, str]:
    """Return texts of a form such as KEY=VALUE as a dictionary."""
    pairs = [text.partition("=") for text in given]
    if wrong := [
        text for text, (key, equals, _) in zip(given, pairs, strict=True) if not key or not equals
    ]:
        raise ValueError(f"{field} must be {form}, not {wrong[0]!r}")
    return {key: value for key, _, value in pairs}


def _weights_of(given: tuple[str, ...]) -> dict[str, float]:
    """Return the weights of tenants by name.

    Raises:
        ValueError: A text is not TENANT=NUMBER.
    """
    pairs = _pairs_of("tenant_weights", given, "TENANT=NUMBER")
    try:
        return {tenant: float(text) for tenant, text in pairs.items()}
    except ValueError:
        raise ValueError(f"tenant_weights must be TENANT=NUMBER, not {given[0]!r}") from None
