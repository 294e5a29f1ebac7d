"""The home is one user's alone, and nothing in it that others could have written is run."""

import os
import stat
from pathlib import Path

import pytest

from coserve.home import close_files, is_trusted, make_private, private_files

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_and_those_above_it_are_closed_to_others(tmp_path: Path):
    assert make_private(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_an_open_directory_of_ours_is_closed(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "coserve.db").write_text("x")
    (home / "coserve.db").chmod(0o644)
    (home / "link").symlink_to(__file__)
    before = mode(Path(__file__))
    assert make_private(home)
    close_files(home)
    assert mode(home) == 0o700 and mode(home / "coserve.db") == 0o600
    assert mode(Path(__file__)) == before, "links are not followed"


def test_directories_that_all_share_stay_as_they_are(tmp_path: Path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    assert not make_private(shared)
    assert mode(shared) == 0o1777
    before = mode(Path("/"))
    assert not make_private(Path("/"))
    assert mode(Path("/")) == before


@needs_root
def test_directories_of_others_stay_as_they_are(tmp_path: Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 12345, 12345)
    assert not make_private(theirs)
    assert mode(theirs) == 0o755


def test_the_mask_is_as_it_was_once_the_last_has_left_in_any_order():
    before = os.umask(0o022)
    try:
        first, second = private_files(), private_files()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert os.umask(0o077) == 0o077, "the second is still within"
        second.__exit__(None, None, None)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_files_made_meanwhile_are_private(tmp_path: Path):
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "in").write_text("x")
        (tmp_path / "after").write_text("x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "in") == 0o600 and mode(tmp_path / "after") == 0o644


def test_what_others_can_write_is_not_trusted(tmp_path: Path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o755)
    file = directory / "x.so"
    file.write_bytes(b"x")
    file.chmod(0o644)
    assert is_trusted(file)
    for wrong in (0o664, 0o646):
        file.chmod(wrong)
        assert not is_trusted(file)
    file.chmod(0o600)
    for wrong in (0o775, 0o757):
        directory.chmod(wrong)
        assert not is_trusted(file)
    directory.chmod(0o1777)  # there, nobody takes away what is another's
    assert is_trusted(file)


@needs_root
def test_what_others_own_is_not_trusted(tmp_path: Path):
    file = tmp_path / "x.so"
    file.write_bytes(b"x")
    assert is_trusted(file)
    os.chown(file, 12345, 12345)
    assert not is_trusted(file)
