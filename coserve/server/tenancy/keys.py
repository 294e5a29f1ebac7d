"""Keys and their tenants; only digests of keys are kept, in memory and in files.

The digest is SHA-256, unsalted and fast. Slow, salted digests protect secrets that people choose
from guessing; a key of `new_key` has 256 random bits, which cannot be guessed, and every request
would pay for a slow digest. Keys that people choose on the command line are never written down.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.server.tenancy.limits import TenantLimits

# The tenant of a server without keys.
DEFAULT_TENANT = "default"
TENANT_NAME = r"[\w.-]{1,64}"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """Return a new random key."""
    return f"cs-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """Return the digest of a key: sha256: and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def is_digest(text: str) -> bool:
    """Return whether a text is a digest of `digest_of`."""
    return _DIGEST.fullmatch(text) is not None


def tenant_and_digest(text: str) -> tuple[str, str]:
    """Return the tenant and the digest of KEY or TENANT=KEY, where KEY may be a digest.

    The tenant of a key without one gets a name from the digest.

    Raises:
        ValueError: The key is empty.
    """
    if not text:
        raise ValueError("api_keys must be KEY or TENANT=KEY, and no key may be empty")
    named = re.fullmatch(rf"({TENANT_NAME})=([^=].*)", text)
    name, key = named.groups() if named else ("", text)
    digest = key if is_digest(key) else digest_of(key)
    return name or f"key-{digest.removeprefix('sha256:')[:8]}", digest


@dataclass(frozen=True, kw_only=True)
class KeyRing:
    """Keys in force, and the limits of their tenants."""

    tenants: Mapping[str, str] = field(default_factory=dict)
    """Tenants by the digests of their keys; if empty, all clients are one tenant, which is an
    operator.
    """
    operators: frozenset[str] = frozenset()
    """Tenants that may see metrics and status of all tenants."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Limits of tenants that have their own."""
    common: TenantLimits = field(default_factory=TenantLimits)
    """Limits of all other tenants."""

    @property
    def is_open(self) -> bool:
        """Return whether requests need no key."""
        return not self.tenants

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant of a key, or None.

        All keys are compared, each in constant time, so that the duration reveals nothing.
        """
        wanted, owner = digest_of(key), None
        for digest, tenant in self.tenants.items():
            if hmac.compare_digest(digest, wanted):
                owner = tenant
        return owner

    def is_operator(self, tenant: str) -> bool:
        return self.is_open or tenant in self.operators

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, self.common)
