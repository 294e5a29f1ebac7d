"""Options of keys, and of the limits of tenants."""

from dataclasses import dataclass, fields
from pathlib import Path

from coserve.server.options.option import OptionGroup, option
from coserve.server.tenancy.keys import tenant_and_digest
from coserve.server.tenancy.limits import TenantLimits
from coserve.server.units import bytes_of


@dataclass(frozen=True, kw_only=True)
class TenantOptions(OptionGroup):
    """Options of keys, and of the limits of tenants."""

    api_keys: tuple[str, ...] = option(
        (),
        "--api-key",
        "Key that clients must send, as KEY or TENANT=KEY; can be given several times. Prefer "
        "--api-keys-file or COSERVE_API_KEYS: ps shows this option to all users of the machine.",
        metavar="KEY",
        shown="none needed",
    )
    api_keys_file: str | None = option(
        None,
        "--api-keys-file",
        "File with digests of keys and limits of tenants (see coserve keys new); read again on "
        "SIGHUP.",
        metavar="FILE",
        shown="none",
    )
    operators: tuple[str, ...] = option(
        (),
        "--operator",
        "Tenant whose keys may see metrics and status of all tenants; can be given several times.",
        metavar="TENANT",
        shown="without keys, all",
    )
    tenant_max_requests: int | None = option(
        None,
        "--tenant-max-requests",
        "Maximum number of sequences that a tenant may have running or waiting.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_tokens_per_minute: int | None = option(
        None,
        "--tenant-tokens-per-minute",
        "Maximum rate of a tenant's prompt and generated tokens.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_jobs: int | None = option(
        None,
        "--tenant-max-jobs",
        "Maximum number of a tenant's jobs that have not ended.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_running_jobs: int | None = option(
        None,
        "--tenant-max-running-jobs",
        "Maximum number of a tenant's jobs that train at once.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_max_file_bytes: int | None = option(
        None,
        "--tenant-max-files",
        "Maximum size of all files of a tenant, such as 10GB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="no limit",
    )
    tenant_max_batches: int | None = option(
        None,
        "--tenant-max-batches",
        "Maximum number of a tenant's batches that have not ended.",
        parse=int,
        metavar="N",
        shown="no limit",
    )
    tenant_weights: tuple[str, ...] = option(
        (),
        "--tenant-weight",
        "Share of the device for a tenant relative to others, as TENANT=NUMBER; can be given "
        "several times.",
        metavar="TENANT=N",
        shown="1 for each",
    )
    share_prefixes: bool = option(
        False,
        "--share-prefixes",
        "Share cached prompt prefixes among tenants. A tenant can then learn from cached_tokens "
        "and from latency how prompts of others begin.",
    )
    public_prefixes: tuple[Path, ...] = option(
        (),
        "--public-prefix",
        "File with a system prompt, or the beginning of a text, whose KV cache all tenants share; "
        "can be given several times.",
        metavar="FILE",
        shown="none",
    )
    allow_adapter_paths: tuple[Path, ...] = option(
        (),
        "--allow-adapter-paths",
        "Directory from which /v1/load_lora_adapter may load adapters; can be given several times.",
        metavar="DIR",
        shown="nothing is read",
    )

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: One is out of range; the message names it.
        """
        if len(self.tenants) != len(self.api_keys):
            raise ValueError("api_keys must differ from one another")
        assert self.tenant_limits is not None  # checks them

    @property
    def tenants(self) -> dict[str, str]:
        """Tenants by the digests of their keys, of those in `api_keys`."""
        return {digest: tenant for tenant, digest in map(tenant_and_digest, self.api_keys)}

    @property
    def tenant_limits(self) -> TenantLimits:
        """Limits of tenants that have none of their own."""
        return TenantLimits(
            **{each.name: getattr(self, f"tenant_{each.name}") for each in fields(TenantLimits)}
        )
