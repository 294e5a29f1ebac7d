"""A real FTP server, in a process of its own: one of the places that fsspec knows, and the lightest
to start."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PASSWORD = "hunter2"
_START_S = 60.0


class FtpServer:
    """What is put there lies in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        self.url = f"ftp://ann:{PASSWORD}@127.0.0.1:{self.port}/kept/here"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, may_write: bool = True) -> None:
        """It answers when this returns."""
        server = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "pyftpdlib",
            "-i",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        user = [
            "-u",
            "ann",
            "-P",
            PASSWORD,
            "-d",
            str(self.directory),
            *(["-w"] if may_write else []),
        ]
        self._process = subprocess.Popen(
            [*server, *user], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s = time.monotonic() + _START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self._process.poll() is None and time.monotonic() < until_s, (
                "the FTP server does not start"
            )
            time.sleep(0.05)

    def stop(self) -> None:
        """It answers no more; what it has stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def files(self) -> list[str]:
        """What is there, below the URL."""
        top = self.directory / "kept" / "here"
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


@contextmanager
def ftp_server(directory: Path) -> Iterator[FtpServer]:
    """One that answers."""
    server = FtpServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()
