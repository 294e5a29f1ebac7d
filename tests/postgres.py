"""A PostgreSQL server of its own for tests: started from Debian's package (or wherever its programs
are), thrown away after them, also if they are killed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from pwd import getpwnam
from tempfile import mkdtemp
from typing import Any

import psycopg
import pytest

_PASSWORD = "not for others"
_USER = "coserve"
# Waits until the process of the tests has ended, however that was: then its end of the pipe is
# closed.
_REMOVE_AFTERWARDS = 'cat; "$1" stop --pgdata "$2/data" --mode immediate --silent; rm -rf "$2"'
# Runs a command as another user. `Popen` with a user copies the process before it starts another
# one, which fails where earlier tests have left the process more address space than the machine has
# memory.
_RUN_AS = """
import os, sys
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[1]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_programs() -> Path | None:
    """The folder of initdb and pg_ctl, of the newest version; None if there is none."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def _other_user() -> tuple[int, int] | None:
    """Return the ids of a user and group to run as, since PostgreSQL refuses to run as root; None:
    the user's own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    pytest.skip("PostgreSQL refuses to run as root, and there is no other user")


class Postgres:
    """A server that listens at a socket in its own directory, and asks for a password."""

    def __init__(self, programs: Path) -> None:
        other = _other_user()
        self._programs = programs
        self._as = [] if other is None else [sys.executable, "-c", _RUN_AS, *map(str, other)]
        self.directory = Path(mkdtemp(prefix="coserve-postgres-"))
        password = self.directory / "password"
        password.write_text(_PASSWORD)
        if other is not None:
            for path in (self.directory, password):
                os.chown(path, *other)
        self._remover = subprocess.Popen(
            [
                *self._as,
                "/bin/sh",
                "-c",
                _REMOVE_AFTERWARDS,
                "sh",
                str(programs / "pg_ctl"),
                str(self.directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what ends the tests, Ctrl-C say, is not to end this
        )
        self._run(
            "initdb",
            "--username",
            _USER,
            "--pwfile",
            str(password),
            "--auth",
            "scram-sha-256",
            "--no-sync",
        )
        self._numbers = count()
        self.start()

    def start(self) -> None:
        # Nothing here must survive the machine.
        settings = f"-c listen_addresses= -c unix_socket_directories={self.directory} -c fsync=off"
        self._run(
            "pg_ctl",
            "start",
            "--wait",
            "--silent",
            "--log",
            str(self.directory / "log"),
            "--options",
            settings,
        )

    def stop(self, mode: str = "immediate") -> None:
        """immediate: as if it were killed."""
        self._run("pg_ctl", "stop", "--wait", "--silent", "--mode", mode)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Killed, and there again afterwards."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def remove(self) -> None:
        self._remover.communicate()
        assert not self.directory.exists()

    def url(self, database: str) -> str:
        """In SQLAlchemy's form."""
        return f"postgresql://{_USER}:{_PASSWORD.replace(' ', '%20')}@/{database}?host={self.directory}"

    def new_database(self) -> str:
        """Its URL."""
        name = f"test{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, database: str, statement: str) -> list[Any]:
        """Any statement, past coserve; the rows that it returns."""
        with psycopg.connect(
            dbname=database,
            user=_USER,
            password=_PASSWORD,
            host=str(self.directory),
            autocommit=True,
        ) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        command = [
            *self._as,
            str(self._programs / program),
            "--pgdata",
            str(self.directory / "data"),
            *arguments,
        ]
        # To a file: the server that pg_ctl starts would keep a pipe open.
        with (self.directory / "out").open("w+") as out:
            done = subprocess.run(command, stdout=out, stderr=out, cwd=self.directory)
            assert done.returncode == 0, (command, (self.directory / "out").read_text())


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """One as long as it is needed; skips the test where PostgreSQL is not installed."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    server = Postgres(programs)
    try:
        yield server
    finally:
        server.remove()
