"""Options of a server, in groups; each field has its option and help text."""

from coserve.server.options.http import HttpOptions
from coserve.server.options.model import ModelOptions
from coserve.server.options.operation import OperationOptions
from coserve.server.options.option import Option, OptionGroup, option_of
from coserve.server.options.scheduling import SchedulingOptions
from coserve.server.options.tenants import TenantOptions

# By the titles under which help texts list them, in this order.
GROUPS: dict[str, type[OptionGroup]] = {
    "Model": ModelOptions,
    "Memory and scheduling": SchedulingOptions,
    "Tenants": TenantOptions,
    "HTTP": HttpOptions,
    "Operation": OperationOptions,
}

__all__ = [
    "GROUPS",
    "HttpOptions",
    "ModelOptions",
    "OperationOptions",
    "Option",
    "OptionGroup",
    "SchedulingOptions",
    "TenantOptions",
    "option_of",
]
