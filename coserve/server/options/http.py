"""Options of connections, bodies, and cross-origin requests."""

import re
from dataclasses import dataclass

from coserve.server.bodies.other_fields import UNKNOWN_FIELDS
from coserve.server.options.hosts import check_hosts
from coserve.server.options.option import OptionGroup, check_choice, check_seconds, option
from coserve.server.units import bytes_of, seconds_of
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class HttpOptions(OptionGroup):
    """Options of connections, bodies, and cross-origin requests."""

    host: str = option(
        "127.0.0.1",
        "--host",
        "Address to listen on; 0.0.0.0 for all networks (set --api-key then).",
    )
    port: int = option(8000, "--port", "Port to listen on; 0 for any free port.")
    ssl_certfile: str | None = option(
        None,
        "--ssl-certfile",
        "Certificate chain in PEM format; the server then uses HTTPS.",
        shown="http",
    )
    ssl_keyfile: str | None = option(
        None,
        "--ssl-keyfile",
        "Private key of --ssl-certfile, in PEM format.",
        shown="in --ssl-certfile",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts",
        "Host name by which requests may address the server, such as *.example.com, or * for any; "
        "can be given several times.",
        metavar="HOST",
        shown="localhost if --host is only this machine's; else any",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origin",
        "Origin whose pages may call the server from a browser, such as https://chat.example.com, "
        "or * for any; can be given several times.",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        "",
        "--root-path",
        "Path prefix that a proxy adds, such as /llm.",
        metavar="PATH",
        shown="none",
    )
    max_connections: int = option(
        2048,
        "--max-connections",
        "Maximum number of connections; a new one replaces the one that has been idle longest.",
    )
    max_body_bytes: int = option(
        8 * 10**6,
        "--max-body",
        "Maximum size of a request body with a prompt; other bodies may have 1MB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="8MB",
    )
    max_upload_bytes: int = option(
        512 * 10**6,
        "--max-upload",
        "Maximum size of an uploaded file.",
        parse=bytes_of,
        metavar="SIZE",
        shown="512MB",
    )
    timeout_headers_s: float = option(
        20.0,
        "--timeout-headers",
        "Time within which the headers of a request must arrive.",
        parse=seconds_of,
        metavar="TIME",
        shown="20s",
    )
    timeout_body_s: float = option(
        30.0,
        "--timeout-body",
        "Time within which a body must arrive, unless it arrives at 10 kB/s or faster.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )
    timeout_keep_alive_s: float = option(
        # Longer than clients keep an idle connection (httpx: 5 s): one that is closed just as it is
        # used again loses a request.
        75.0,
        "--timeout-keep-alive",
        "Time after which an idle connection is closed.",
        parse=seconds_of,
        metavar="TIME",
        shown="75s",
    )
    unknown_fields: str = option(
        "warn",
        "--unknown-fields",
        "Handling of unknown fields in requests: ignore; warn, in a response header and in the "
        "log; or refuse. Fields that are known to change an answer and are not supported are "
        "always refused.",
    )
    request_timeout_s: float | None = option(
        None,
        "--request-timeout",
        "Maximum time of a completion from its request to its last token, such as 10min; it then "
        "ends with an error.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: One is out of range; the message names it.
        """
        check_whole("port", self.port, 0, 65535)
        for name in ("max_connections", "max_body_bytes", "max_upload_bytes"):
            check_whole(name, getattr(self, name), 1)
        for name in (
            "timeout_headers_s",
            "timeout_body_s",
            "timeout_keep_alive_s",
            "request_timeout_s",
        ):
            check_seconds(name, getattr(self, name))
        check_choice("unknown_fields", self.unknown_fields, UNKNOWN_FIELDS)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        check_hosts(self.allowed_hosts)
        for origin in self.cors_origins:
            if re.fullmatch(r"\*|https?://[^/\s]+", origin) is None:
                raise ValueError(
                    f"cors_origins must be such as https://chat.example.com, without a path, or *, "
                    f"not {origin!r}"
                )
        if self.root_path and re.fullmatch(r"(/[^/?#\s]+)+", self.root_path) is None:
            raise ValueError(
                f"root_path must be a path such as /llm, without a slash at its end, not "
                f"{self.root_path!r}"
            )
