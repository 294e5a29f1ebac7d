"""Options of storage, logs and traces, and of the end of the server."""

from dataclasses import dataclass
from pathlib import Path

from coserve.home import home_directory
from coserve.jobs.files.remote_files import files_url as check_files_url
from coserve.logs import FORMATS, LEVELS
from coserve.server.options.option import OptionGroup, check_choice, option
from coserve.server.units import bytes_of, seconds_of
from coserve.settings import check_whole, is_number

RESULT_ENCODINGS = ("plain", "base64")


@dataclass(frozen=True, kw_only=True)
class OperationOptions(OptionGroup):
    """Options of storage, logs and traces, and of the end of the server."""

    home: str | None = option(
        None,
        "--home",
        "Directory for files, jobs and adapters.",
        metavar="DIR",
        shown="$COSERVE_HOME or ~/.coserve",
    )
    database: str | None = option(
        None,
        "--database",
        "Database for files and jobs, as a SQLAlchemy URL such as postgresql://me@host/coserve. "
        "Put a URL with a password in COSERVE_DATABASE instead: ps shows this option to all users "
        "of the machine.",
        metavar="URL",
        shown="$COSERVE_DATABASE or SQLite in --home",
    )
    files_url: str | None = option(
        None,
        "--files-url",
        "fsspec URL where files and checkpoints are stored in addition to --home, such as "
        "s3://bucket/prefix; nodes of a cluster then need no shared disk. Put a URL with a "
        "password in COSERVE_FILES_URL.",
        metavar="URL",
        shown="$COSERVE_FILES_URL or --home alone",
    )
    result_encoding: str = option(
        "plain",
        "--result-encoding",
        "Encoding of jobs' result files, which are CSV: plain, or base64 as OpenAI returns them.",
    )
    max_response_bytes: int = option(
        100 * 10**6,
        "--response-storage",
        "Storage for each tenant's answers of /v1/responses, such as 1GB; the oldest are deleted "
        "first.",
        parse=bytes_of,
        metavar="SIZE",
        shown="100MB",
    )
    measures_first: bool = option(
        False,
        "--measure-first",
        "Measure a CPU that has no profile of the model before serving. Otherwise the server "
        "starts with a quick, cautious profile and measures the full one while it is idle.",
    )
    log_format: str = option(
        "text", "--log-format", f"Format of log lines on stderr: {' or '.join(FORMATS)}."
    )
    log_level: str = option(
        "warning",
        "--log-level",
        f"Minimum level of log lines: {', '.join(LEVELS)}; info logs each request.",
    )
    otlp_endpoint: str | None = option(
        None,
        "--otlp-endpoint",
        "URL of an OpenTelemetry collector that traces are sent to, such as http://localhost:4318 "
        "(docs/operations.md).",
        metavar="URL",
        shown="$OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    record: str | None = option(
        None,
        "--record",
        "File in which to record all commands to the engine and its results, for coserve replay.",
        shown="nothing",
    )
    engine_timeout_s: float = option(
        30.0,
        "--engine-timeout",
        "Time without a sign of life after which the engine is restarted; its jobs resume.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )
    drain_s: float = option(
        30.0,
        "--drain",
        "Time for which open streams may continue after a signal to stop, such as 30s or 2min.",
        parse=seconds_of,
        metavar="TIME",
        shown="30s",
    )

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: One is out of range; the message names it.
        """
        check_whole("max_response_bytes", self.max_response_bytes, 1)
        check_choice("result_encoding", self.result_encoding, RESULT_ENCODINGS)
        check_choice("log_format", self.log_format, FORMATS)
        check_choice("log_level", self.log_level, LEVELS)
        if not is_number(self.engine_timeout_s) or self.engine_timeout_s < 2:
            raise ValueError(
                f"engine_timeout_s must be a number of seconds, 2 or more, not "
                f"{self.engine_timeout_s!r}"
            )
        if not is_number(self.drain_s) or self.drain_s < 0:
            raise ValueError(
                f"drain_s must be a number of seconds, 0 or more, not {self.drain_s!r}"
            )
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(
            ("http://", "https://")
        ):
            raise ValueError(
                f"otlp_endpoint must be a URL of http or https, not {self.otlp_endpoint!r}"
            )
        check_files_url(self.files_url)
        if self.database is not None and "://" not in self.database:
            raise ValueError(
                f"database must be a URL of SQLAlchemy, such as postgresql://me@host/coserve or "
                f"sqlite:////DIR/jobs.db, not {self.database!r}"
            )

    @property
    def directory(self) -> Path:
        """The home directory, from the option or the environment."""
        return home_directory(self.home)
