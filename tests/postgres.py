"""A PostgreSQL server of its own for tests: started from Debian's package (or wherever its programs are), thrown away
after them, also if they are killed.
"""

import os
import shutil
import subprocess
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
# Waits until the process of the tests has ended, however that was: then its end of the pipe is closed.
_REMOVE_AFTERWARDS = 'cat; "$1" stop --pgdata "$2/data" --mode immediate --silent; rm -rf "$2"'


def find_programs() -> Path | None:
    """The folder of initdb and pg_ctl, of the newest version; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def _other_user() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL refuses to run as root, and there is no other user")


class Postgres:
    """A server that listens at a socket in its own directory, and asks for a password."""

    def __init__(self, programs: Path) -> None:
        self._programs, self._as = programs, _other_user()
        self.directory = Path(mkdtemp(prefix="coserve-postgres-"))
        password = self.directory / "password"
        password.write_text(_PASSWORD)
        if self._as:
            for path in (self.directory, password):
                os.chown(path, self._as["user"], self._as["group"])
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE_AFTERWARDS, "sh", str(programs / "pg_ctl"), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what ends the tests, Ctrl-C say, is not to end this
            **self._as,
        )
        self._run("initdb", "--username", _USER, "--pwfile", str(password), "--auth", "scram-sha-256", "--no-sync")
        self._numbers = count()
        self.start()

    def start(self) -> None:
        # Nothing here must survive the machine.
        settings = f"-c listen_addresses= -c unix_socket_directories={self.directory} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--silent", "--log", str(self.directory / "log"), "--options", settings)

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
            dbname=database, user=_USER, password=_PASSWORD, host=str(self.directory), autocommit=True
        ) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "--pgdata", str(self.directory / "data"), *arguments]
        # To a file: the server that pg_ctl starts would keep a pipe open.
        with (self.directory / "out").open("w+") as out:
            done = subprocess.run(command, stdout=out, stderr=out, cwd=self.directory, **self._as)
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
