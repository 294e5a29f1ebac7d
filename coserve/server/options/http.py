"""Connections, bodies, and pages of others."""

import re
from dataclasses import dataclass

from coserve.server.bodies.other_fields import UNKNOWN_FIELDS
from coserve.server.options.hosts import check_hosts
from coserve.server.options.option import OptionGroup, check_choice, check_seconds, option
from coserve.server.units import bytes_of, seconds_of
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class HttpOptions(OptionGroup):
    """Connections, bodies, and pages of other origins."""

    host: str = option(
        "127.0.0.1",
        "--host",
        "Address to listen at; 0.0.0.0 for every network (think of --api-key).",
    )
    port: int = option(8000, "--port", "Port to listen at; 0 for any that is free.")
    ssl_certfile: str | None = option(
        None, "--ssl-certfile", "Certificate chain in PEM's format: serve https.", shown="http"
    )
    ssl_keyfile: str | None = option(
        None, "--ssl-keyfile", "Its private key.", shown="in --ssl-certfile"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts",
        "Name that requests may call the server by, such as *.example.com, or * for any; may be "
        "given several times.",
        metavar="HOST",
        shown="localhost if --host is only this machine's; else any",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origin",
        "Origin whose pages may call the server from a browser, such as https://chat.example.com, "
        "or * for any; may be "
        "given several times.",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        "",
        "--root-path",
        "Path that a proxy puts before the server's, such as /llm.",
        metavar="PATH",
        shown="none",
    )
    max_connections: int = option(
        2048,
        "--max-connections",
        "Connections at once; the longest idle one makes room for another.",
    )
    max_body_bytes: int = option(
        8 * 10**6,
        "--max-body",
        "Of a request with a prompt; others may have 1MB.",
        parse=bytes_of,
        metavar="SIZE",
        shown="8MB",
    )
    max_upload_bytes: int = option(
        512 * 10**6, "--max-upload", "Of a file.", parse=bytes_of, metavar="SIZE", shown="512MB"
    )
    timeout_headers_s: float = option(
        20.0,
        "--timeout-headers",
        "How long the headers of a request may take to come.",
        parse=seconds_of,
        metavar="TIME",
        shown="20s",
    )
    timeout_body_s: float = option(
        30.0,
        "--timeout-body",
        "How long a body may take to come, unless it comes at 10 kB/s.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )
    timeout_keep_alive_s: float = option(
        # Longer than clients keep an idle connection (httpx: 5 s): one that is closed just as it is
        # used again loses a request.
        75.0,
        "--timeout-keep-alive",
        "How long a connection may be idle after an answer.",
        parse=seconds_of,
        metavar="TIME",
        shown="75s",
    )
    unknown_fields: str = option(
        "warn",
        "--unknown-fields",
        "Fields of requests that are not known here: ignore; warn, by a header of the answer and a "
        "line in the log; or "
        "refuse. Those that are known to change an answer and are not supported are always "
        "refused.",
    )
    request_timeout_s: float | None = option(
        None,
        "--request-timeout",
        "How long a completion may take from its request to its last token, such as 10min; then it "
        "ends with an error.",
        parse=seconds_of,
        metavar="TIME",
        shown="as long as it needs",
    )

    def check(self) -> None:
        """ValueError names the field and its range."""
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
