"""Files that machines share by a URL, on a real FTP server: whole or not at all, and clear
errors."""

import logging
import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from ftp import PASSWORD, FtpServer, ftp_server

from coserve.errors import DataError, StoreError
from coserve.jobs.files.remote_files import MARKER, RemoteFiles, files_url
from coserve.server.config import ServerConfig

pytestmark = pytest.mark.skipif(
    find_spec("pyftpdlib") is None, reason="needs an FTP server: pip install pyftpdlib"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ftp_server(tmp_path_factory.mktemp("ftp")) as found:
        yield found


@pytest.fixture
def here(server, tmp_path):
    return machine(server, tmp_path, "here")


@pytest.fixture
def there(server, tmp_path):
    return machine(server, tmp_path, "there")


class Machine:
    def __init__(self, files: RemoteFiles, home: Path) -> None:
        self.files, self.home = files, home


def machine(server: FtpServer, tmp_path: Path, name: str, most_bytes: int | None = None) -> Machine:
    """Each test has a place of its own on the server."""
    url = f"{server.url}/{tmp_path.name}"
    return Machine(
        RemoteFiles(url, tmp_path / name, most_bytes=most_bytes, waits_s=()), tmp_path / name
    )


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def test_what_one_machine_keeps_another_one_fetches(here, there):
    file = write(here.home / "files", blob=os.urandom(300_000)) / "blob"
    checkpoint = write(
        here.home / "jobs" / "a" / "checkpoints" / "step-1",
        weights=b"w" * 70_000,
        config=b"",
        state=b"s",
    )
    here.files.keep(file)
    named = here.files.keep_checkpoint(checkpoint)
    assert (
        named.parent == checkpoint.parent
        and named.name.startswith("step-1-")
        and not checkpoint.exists()
    )
    for path in (file, named):
        there.files.fetch(there.home / path.relative_to(here.home))
    assert (there.home / "files" / "blob").read_bytes() == file.read_bytes()
    found = there.home / named.relative_to(here.home)
    assert {each.name: each.read_bytes() for each in found.iterdir()} == {
        each.name: each.read_bytes() for each in named.iterdir()
    }
    assert oct(found.parent.stat().st_mode & 0o777) == "0o700"


def test_two_processes_that_make_a_directory_at_the_same_moment_both_write_into_it(
    server, here, monkeypatch
):
    """A server and its engine do this when they start: FTP refuses the second."""
    from fsspec.implementations.ftp import FTPFileSystem

    makes = FTPFileSystem.mkdir

    def second(fs, path, create_parents=True):
        makes(fs, path, create_parents)
        makes(fs, path, False)

    monkeypatch.setattr(FTPFileSystem, "mkdir", second)
    with pytest.raises(Exception, match="File exists"):
        FTPFileSystem(host="127.0.0.1", port=server.port, username="ann", password=PASSWORD).mkdir(
            "/somewhere-else"
        )
    here.files.check()


def test_the_same_name_by_two_machines_is_two_checkpoints(here, there):
    kept = [
        each.files.keep_checkpoint(
            write(each.home / "jobs" / "a" / "checkpoints" / "step-5", weights=content)
        )
        for each, content in ((here, b"one"), (there, b"two"))
    ]
    assert kept[0].name != kept[1].name
    here.files.fetch(other := here.home / kept[1].relative_to(there.home))
    assert (other / "weights").read_bytes() == b"two"


def test_an_upload_that_breaks_off_is_no_checkpoint_for_anybody(server, here, there):
    directory = write(here.home / "jobs" / "a" / "checkpoints" / "step-1", a_config=b"{}")
    (directory / "weights").symlink_to("nowhere")
    with pytest.raises(StoreError, match="cannot be used"):
        here.files.keep(directory)
    assert any(name.endswith("step-1/a_config") for name in server.files()), "half of it is there"
    away = there.home / directory.relative_to(here.home)
    there.files.fetch(away)
    assert not away.exists() and there.files.entries(away.parent) == [away]
    assert there.files.discard(away) and there.files.entries(away.parent) == []


def test_what_was_cut_short_is_not_taken(server, here, there):
    directory = write(here.home / "jobs" / "a" / "step-1", weights=b"w" * 1000)
    here.files.keep(directory)
    (kept,) = server.directory.rglob(f"{here.home.parent.name}/jobs/a/step-1/weights")
    kept.write_bytes(b"w" * 999)
    away = there.home / directory.relative_to(here.home)
    with pytest.raises(StoreError, match="has 999 bytes, and had 1000"):
        there.files.fetch(away)
    assert list(away.parent.iterdir()) == []


@pytest.mark.parametrize(
    "marker",
    [b'{"../../evil": 4}', b'{"/tmp/evil": 4}', b'{".evil": 4}', b'{"a": -1}', b"[", b"[]"],
)
def test_a_marker_that_names_other_places_is_refused(server, here, there, marker):
    directory = write(here.home / "jobs" / "a" / "step-1", evil=b"evil")
    here.files.keep(directory)
    (kept,) = server.directory.rglob(f"{here.home.parent.name}/jobs/a/step-1/{MARKER}")
    kept.write_bytes(marker)
    with pytest.raises(DataError, match="does not say which files there are"):
        there.files.fetch(there.home / "jobs" / "a" / "step-1")
    assert [path.name for path in there.home.rglob("*") if path.is_file()] == []


def test_what_is_over_is_an_adapter_alone(here, there):
    directory = write(here.home / "jobs" / "a" / "step-1", weights=b"w", job=b"j")
    here.files.keep(directory)
    away = there.home / directory.relative_to(here.home)
    assert there.files.is_file(away / "job")
    assert here.files.discard(directory / "job")
    assert not there.files.is_file(away / "job") and there.files.is_file(away / "weights")
    there.files.fetch(away)
    assert [each.name for each in away.iterdir()] == ["weights"]
    assert here.files.discard(directory) and not directory.exists()
    assert not there.files.is_file(away / "weights") and here.files.discard(directory)


def test_what_is_listed_is_what_is_here_or_there(here, there):
    jobs, away = here.home / "jobs", there.home / "jobs"
    here.files.keep(write(jobs / "a", data=b"1") / "data")
    here.files.keep(write(jobs / "b" / "step", data=b"1"))
    write(away / "c", data=b"1")
    assert there.files.entries(away) == [away / "a", away / "b", away / "c"]
    assert {away / "a" / "data", away / "b" / "step" / "data", away / "c" / "data"} <= {
        *there.files.all_below(away)
    }
    assert there.files.entries(away / "d") == [] and there.files.discard(away / "d")
    elsewhere = there.home.parent / "elsewhere"
    there.files.fetch(elsewhere)
    assert not there.files.is_file(elsewhere)


def test_an_upload_is_tried_again_until_the_server_is_back(tmp_path, caplog):
    with ftp_server(tmp_path / "ftp") as server:
        files = RemoteFiles(server.url, tmp_path / "here", waits_s=[0.1] * 1000)
        file = write(tmp_path / "here", data=b"data") / "data"
        server.stop()
        with caplog.at_level(logging.WARNING):
            keeping = threading.Thread(target=files.keep, args=(file,))
            keeping.start()
            while "trying again" not in caplog.text:
                assert keeping.is_alive()
                time.sleep(0.01)
            server.start()
            keeping.join(120)
        assert server.files() == ["data"]
        assert PASSWORD not in caplog.text


def test_a_server_that_stays_away_is_a_clear_error(tmp_path):
    with ftp_server(tmp_path / "ftp") as server:
        files = RemoteFiles(server.url, tmp_path / "here", waits_s=(0.01, 0.01))
        server.stop()
        with pytest.raises(
            StoreError, match=r"ann:\*\*\*@.*Connection refused.*see that the URL is right"
        ) as caught:
            files.keep(write(tmp_path / "here", data=b"data") / "data")
        assert PASSWORD not in str(caught.value)
        with pytest.raises(StoreError):  # and not: there is none
            files.is_file(tmp_path / "here" / "data")
        assert not files.discard(tmp_path / "here" / "data")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ((f":{PASSWORD}@", ":guessed@"), "530 Authentication failed"),
        (("ftp://", "gopher://"), "Protocol not known: gopher"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_at_the_start(server, tmp_path, change, wrong):
    with pytest.raises(StoreError, match=wrong) as caught:
        RemoteFiles(server.url.replace(*change), tmp_path).check()
    assert (
        "\n" not in str(caught.value)
        and "guessed" not in str(caught.value)
        and PASSWORD not in str(caught.value)
    )


@pytest.mark.skipif(find_spec("smbprotocol") is not None, reason="what should be missing is there")
def test_a_protocol_without_its_package_is_told_with_the_package(tmp_path):
    with pytest.raises(StoreError, match=r"smbprotocol.*here and on every node"):
        RemoteFiles("smb://host/share", tmp_path).check()


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path):
    server = FtpServer(tmp_path / "ftp")
    server.start(may_write=False)
    try:
        with pytest.raises(StoreError, match=r"550 .*may read and write there"):
            RemoteFiles(server.url, tmp_path).check()
    finally:
        server.stop()


def test_nothing_is_left_of_a_check(server, here):
    before = server.files()
    here.files.check()
    assert server.files() == before


@pytest.mark.parametrize(
    "url", ["memory://here", "file:///shared", "local://shared", "bucket/prefix", "s3://"]
)
def test_what_other_machines_cannot_read_is_refused(url):
    with pytest.raises(ValueError, match="files_url must be a URL"):
        ServerConfig(files_url=url)


def test_a_url_may_come_by_the_environment(monkeypatch):
    monkeypatch.setenv("COSERVE_FILES_URL", "s3://bucket/of-the-environment")
    assert files_url() == "s3://bucket/of-the-environment"
    assert files_url("s3://bucket/given") == "s3://bucket/given"
    monkeypatch.delenv("COSERVE_FILES_URL")
    assert files_url() is None


def test_what_was_used_longest_ago_makes_room(server, tmp_path):
    node = machine(server, tmp_path, "node", most_bytes=2_500_000)
    checkpoints = [
        write(node.home / "jobs" / "a" / "checkpoints" / name, data=bytes(10**6)) for name in "wxyz"
    ]
    for age_s, each in zip((4000, 3000, 2000, 1000), checkpoints, strict=True):
        os.utime(each, (time.time() - age_s,) * 2)
    node.files.trim({checkpoints[0]})
    assert [each.exists() for each in checkpoints] == [True, False, True, True]
    fresh = write(node.home / "jobs" / "b" / "checkpoints" / "fresh", data=bytes(3 * 10**6))
    node.files.trim(())
    assert fresh.exists() and not any(each.exists() for each in checkpoints), (
        "what is new may be in use"
    )
    node.files.release(fresh)
    assert not fresh.exists()


def test_a_home_alone_is_trimmed_by_nobody(server, tmp_path):
    one = machine(server, tmp_path, "home")
    old = write(one.home / "jobs" / "a" / "checkpoints" / "step-1", data=bytes(10**6))
    os.utime(old, (0, 0))
    one.files.trim(())
    one.files.release(old)
    assert old.exists()
