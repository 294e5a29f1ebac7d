"""Who may ask, and for how much."""

from dataclasses import dataclass, fields
from pathlib import Path

from coserve.server.options.option import OptionGroup, option
from coserve.server.tenancy.keys import tenant_and_digest
from coserve.server.tenancy.limits import Limits
from coserve.server.units import bytes_of


@dataclass(frozen=True, kw_only=True)
class TenantOptions(OptionGroup):
    """Keys and limits."""

    api_keys: tuple[str, ...] = option(
        (),
        "--api-key",
        "KEY or TENANT=KEY that clients must bring; may be given several times. Better "
        "--api-keys-file or "
        "COSERVE_API_KEYS: ps shows this one to all users of the machine.",
        metavar="KEY",
        shown="none needed",
    )
    api_keys_file: str | None = option(
        None,
        "--api-keys-file",
        "More keys, by their digests, and limits of tenants; read again on SIGHUP (coserve keys "
        "new).",
        metavar="FILE",
        shown="none",
    )
    operators: tuple[str, ...] = option(
        (),
        "--operator",
        "Tenant whose keys see metrics and status of all tenants; may be given several times.",
        metavar="TENANT",
        shown="without keys, all",
    )
    tenant_max_requests: int | None = option(
        None,
        "--tenant-max-requests",
        "Sequences that a tenant may have under way at once.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_tokens_per_minute: int | None = option(
        None,
        "--tenant-tokens-per-minute",
        "Tokens of a tenant's prompts and answers.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_jobs: int | None = option(
        None,
        "--tenant-max-jobs",
        "Jobs of a tenant that have not ended.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_running_jobs: int | None = option(
        None,
        "--tenant-max-running-jobs",
        "Jobs of a tenant that train at once.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_file_bytes: int | None = option(
        None,
        "--tenant-max-files",
        "Of all files of a tenant, such as 10GB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="no limit",
    )
    tenant_max_batches: int | None = option(
        None,
        "--tenant-max-batches",
        "Batches of a tenant that have not ended.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_weights: tuple[str, ...] = option(
        (),
        "--tenant-weight",
        "TENANT=NUMBER: a tenant's part of the device beside that of others, which is 1; may be "
        "given several times.",
        metavar="TENANT=N",
        shown="1 for each",
    )
    share_prefixes: bool = option(
        False,
        "--share-prefixes",
        "Have all tenants share what was computed of prompts' beginnings; cached_tokens and times "
        "then tell a tenant "
        "what prompts of others began with.",
    )
    public_prefixes: tuple[Path, ...] = option(
        (),
        "--public-prefix",
        "File with a system prompt, or the beginning of a text, whose computed part all tenants "
        "share; may be given "
        "several times.",
        metavar="FILE",
        shown="none",
    )
    allow_adapter_paths: tuple[Path, ...] = option(
        (),
        "--allow-adapter-paths",
        "Directory below which /v1/load_lora_adapter may read; may be given several times.",
        metavar="DIR",
        shown="nothing is read",
    )

    def check(self) -> None:
        """ValueError names the field and its range."""
        if len(self.tenants) != len(self.api_keys):
            raise ValueError("api_keys must differ from one another")
        assert self.tenant_limits is not None  # checks them

    @property
    def tenants(self) -> dict[str, str]:
        """Tenants by the digests of their keys, of those given here."""
        return {digest: tenant for tenant, digest in map(tenant_and_digest, self.api_keys)}

    @property
    def tenant_limits(self) -> Limits:
        """Of tenants that have none of their own."""
        return Limits(
            **{each.name: getattr(self, f"tenant_{each.name}") for each in fields(Limits)}
        )
