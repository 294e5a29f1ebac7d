"""Sources of keys: the command line, the environment, and a file that is read again on SIGHUP.

The file is TOML. Each key is one line of its digest and its tenant (`coserve keys new TENANT`
prints one). A tenant's limits are in a table of its name; what that leaves out is the server's
common setting:

    [keys] "sha256:…" = "ann" "sha256:…" = "ops"

    [tenants.ops] operator = true

    [tenants.ann] max_requests = 64 tokens_per_minute = 100_000 max_jobs = 20 max_file_bytes =
    "10GB" weight = 2

A weight is a tenant's share of the device relative to others; the engine reads it when it starts.
"""

import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from coserve.errors import CoserveError
from coserve.home import is_trusted
from coserve.secret_variables import SERVER_KEYS, take_variable
from coserve.server.tenancy.keys import TENANT_NAME, KeyRing, is_digest, tenant_and_digest
from coserve.server.tenancy.limits import TenantLimits
from coserve.server.units import bytes_of
from coserve.settings import is_number

_log = logging.getLogger(__name__)

_LIMITS = [each.name for each in fields(TenantLimits)]


class KeySettings(Protocol):
    """Options of a server about keys and tenants."""

    @property
    def tenants(self) -> Mapping[str, str]:
        """Tenants by the digests of their keys."""
        ...

    @property
    def operators(self) -> Sequence[str]:
        """Tenants that are operators."""
        ...

    @property
    def tenant_limits(self) -> TenantLimits:
        """Limits of tenants that have none of their own."""
        ...

    @property
    def api_keys_file(self) -> str | None:
        """Path of the keys file."""
        ...


class Keys:
    """Keys in force: `ring`, which `reload` replaces."""

    def __init__(self, settings: KeySettings) -> None:
        """Read the keys.

        Raises:
            CoserveError: A key or the file is wrong.
        """
        self._settings = settings
        # Commands have taken it before they started other processes (`coserve.cli.server_options`).
        self._environment = _hashed(take_variable(SERVER_KEYS).split())
        self.ring = self._read()
        if not self.ring.is_open and not self.ring.operators:
            _log.warning(
                "no tenant is an operator, so nobody can see the metrics of all tenants: name one "
                "with --operator"
            )

    def reload(self) -> None:
        """Read the file again; an error is logged, and leaves the keys as they are."""
        try:
            self.ring = self._read()
        except CoserveError as error:
            _log.error("%s; the keys remain as they were", error)
        else:
            _log.warning("the keys file was read again: there are %d keys", len(self.ring.tenants))

    def _read(self) -> KeyRing:
        options = self._settings
        tenants = dict(options.tenants)
        _add(tenants, self._environment, SERVER_KEYS)
        operators, limits = set(options.operators), dict[str, TenantLimits]()
        if options.api_keys_file is not None:
            held = _read_file(Path(options.api_keys_file))
            _add(tenants, held.pop("keys"), options.api_keys_file)
            for name, settings in held["tenants"].items():
                if settings.pop("operator", False):
                    operators.add(name)
                # Not a limit: the engine reads weights when it starts.
                settings.pop("weight", None)
                limits[name] = replace(options.tenant_limits, **settings)
        for where, named in (
            ("--operator", options.operators),
            (f"[tenants] of {options.api_keys_file}", limits),
        ):
            for name in named:
                if name not in tenants.values():
                    raise CoserveError(
                        f"{where}: tenant {name!r} has no key; coserve keys new makes one"
                    )
        return KeyRing(
            tenants=tenants,
            operators=frozenset(operators),
            limits=limits,
            common=options.tenant_limits,
        )


def tenant_weights(given: Mapping[str, float], api_keys_file: str | None) -> dict[str, float]:
    """Return the weights of tenants: those given, overridden by those in the keys file."""
    weights = dict(given)
    if api_keys_file is not None:
        for name, settings in _read_file(Path(api_keys_file))["tenants"].items():
            if "weight" in settings:
                weights[name] = settings["weight"]
    return weights


def _hashed(texts: Iterable[str]) -> dict[str, str]:
    return {digest: tenant for tenant, digest in map(tenant_and_digest, texts)}


def _add(tenants: dict[str, str], more: Mapping[str, str], where: str) -> None:
    for digest, tenant in more.items():
        if tenants.setdefault(digest, tenant) != tenant:
            raise CoserveError(
                f"{where} gives tenant {tenant!r} a key that already belongs to "
                f"tenant {tenants[digest]!r}"
            )


def _read_file(path: Path) -> dict[str, Any]:
    """Return `keys`, tenants by digest, and `tenants`, settings by tenant.

    Raises:
        CoserveError: The file cannot be read, or has something wrong in it.
    """
    try:
        if not is_trusted(path):
            raise CoserveError(
                f"other users can write {path}, or its directory: make it writable only by you"
            )
        held = tomllib.loads(path.read_text())
        return {
            "keys": _keys(held.pop("keys", {})),
            "tenants": _tenants(held.pop("tenants", {}), held),
        }
    except OSError as error:
        raise CoserveError(
            f"the keys file {path} cannot be read: {error.strerror or error}"
        ) from None
    except ValueError as error:  # from TOML, UTF-8, or this module
        raise CoserveError(f"the keys file {path} is wrong: {error}") from None


def _keys(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not found:
        raise ValueError("it has no keys; coserve keys new TENANT makes a line for [keys]")
    for number, (digest, tenant) in enumerate(found.items(), 1):
        if not is_digest(digest):  # perhaps a key itself, which must not be logged
            raise ValueError(
                f'line {number} of [keys] does not begin with a digest such as "sha256:…"'
            )
        if not isinstance(tenant, str) or not re.fullmatch(TENANT_NAME, tenant):
            raise ValueError(
                f"{tenant!r} is not a valid name of a tenant: give 1 to 64 letters, digits, dots, "
                f"hyphens, underscores"
            )
    return found


def _tenants(found: Any, others: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if others:
        raise ValueError(f"{next(iter(others))!r} is not one of keys, tenants")
    if not isinstance(found, dict):
        raise ValueError("tenants must be tables, such as [tenants.ann]")
    return {name: _settings(name, each) for name, each in found.items()}


def _settings(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"tenants.{name} must be a table")
    checked: dict[str, Any] = dict(given)
    known = ("operator", "weight", *_LIMITS)
    if unknown := [key for key in checked if key not in known]:
        raise ValueError(
            f"tenants.{name} has {unknown[0]!r}, which is not one of {', '.join(known)}"
        )
    if not isinstance(checked.get("operator", False), bool):
        raise ValueError(f"tenants.{name}.operator must be true or false")
    if "weight" in checked and not (is_number(checked["weight"]) and checked["weight"] > 0):
        raise ValueError(
            f"tenants.{name}.weight must be a number above 0, not {checked['weight']!r}"
        )
    try:
        if isinstance(size := checked.get("max_file_bytes"), str):
            checked["max_file_bytes"] = bytes_of(size)
        TenantLimits(**{key: value for key, value in checked.items() if key in _LIMITS})
    except ValueError as error:
        raise ValueError(f"tenants.{name}: {error}") from None
    return checked
