"""Comparison of files between a front and a node."""

import os
from pathlib import Path

from coserve.cluster.nodes.shared_paths import (
    ExpectedFiles,
    SharedPaths,
    sampled_digest,
    unseen,
    write_probe,
)


def seen(path: Path, what: str = "--home here") -> ExpectedFiles:
    return ExpectedFiles(
        what=what, paths=(str(path),), digest=sampled_digest([path]), advice="mount it"
    )


def test_a_home_is_shared_where_its_newest_probe_is_and_files_can_be_written(tmp_path: Path):
    home = tmp_path / "home"
    old = write_probe(home)
    probe = write_probe(home)
    assert not old.exists() and list(home.iterdir()) == [probe]
    shared = SharedPaths(files=(seen(probe),), home=str(home))
    assert unseen(shared) is None
    assert list(home.iterdir()) == [probe], "what was written to find out is gone"
    home.rename(tmp_path / "elsewhere")
    missing = (
        f"it does not see --home here as the front does ({probe}: No such file or directory): "
        "mount it"
    )
    assert unseen(shared) == missing
    home.mkdir()  # a directory of that name, of this machine alone
    assert unseen(shared) == missing
    probe.write_text("of another front")
    assert (
        unseen(shared)
        == "it does not see --home here as the front does (there are others here): mount it"
    )


def test_a_home_that_can_be_read_alone_is_not_enough(tmp_path: Path):
    why = unseen(SharedPaths(home=str(tmp_path / "none")))
    assert why == (
        f"it cannot write {tmp_path}/none (No such file or directory): "
        "it must run as a user who may"
    )


def test_a_digest_is_of_names_sizes_and_bytes_however_large_a_file_is(tmp_path: Path):
    path = tmp_path / "weights"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 10**10)
    known = {sampled_digest([path])}
    assert sampled_digest([path]) in known
    for at in (0, 10**10 - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"1")
        known.add(sampled_digest([path]))
    os.truncate(path, 10**10 + 1)
    known.add(sampled_digest([path]))
    known.add(sampled_digest([path.rename(tmp_path / "others")]))
    assert len(known) == 5
    small = tmp_path / "small"
    for content in (b"", b"a", b"b"):
        small.write_bytes(content)
        known.add(sampled_digest([small]))
    assert len(known) == 8
