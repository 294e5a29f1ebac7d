"""Keys, known by their digests alone: neither memory nor a file holds one that could be used.

The digest is SHA-256, without salt and fast. Slow, salted ones protect secrets that people choose,
against guessing; a key of `new_key` has 256 random bits, which nobody guesses at any speed, and
every request would pay for a slow one. Keys that people choose for the command line are never
written down.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.server.tenancy.limits import Limits

# The tenant of a server without keys.
DEFAULT_TENANT = "default"
TENANT_NAME = r"[\w.-]{1,64}"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """One that nobody can guess."""
    return f"cs-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """As keys are kept: sha256: and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def is_digest(text: str) -> bool:
    """Whether it is one of `digest_of`."""
    return _DIGEST.fullmatch(text) is not None


def tenant_and_digest(text: str) -> tuple[str, str]:
    """Of KEY or TENANT=KEY, where the key may be a digest already. A key without a name gives its
    tenant one that does not tell the key. ValueError for an empty key.
    """
    if not text:
        raise ValueError("api_keys must be KEY or TENANT=KEY, and no key may be empty")
    named = re.fullmatch(rf"({TENANT_NAME})=([^=].*)", text)
    name, key = named.groups() if named else ("", text)
    digest = key if is_digest(key) else digest_of(key)
    return name or f"key-{digest.removeprefix('sha256:')[:8]}", digest


@dataclass(frozen=True, kw_only=True)
class KeyRing:
    """Who may ask, and how much.

    tenants: by their keys' digests; without any, all clients are one tenant, which may see all.
    operators: tenants whose keys see how the server fares for all tenants. limits: of tenants that
    have their own; others have `common`.
    """

    tenants: Mapping[str, str] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    limits: Mapping[str, Limits] = field(default_factory=dict)
    common: Limits = field(default_factory=Limits)

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self.tenants

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is. All are compared, each in the same time, so that how long it takes tells
        nothing.
        """
        given, found = digest_of(key), None
        for digest, tenant in self.tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found

    def is_operator(self, tenant: str) -> bool:
        return self.is_open or tenant in self.operators

    def limits_of(self, tenant: str) -> Limits:
        return self.limits.get(tenant, self.common)
