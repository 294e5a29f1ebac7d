"""Adapter versions as files, so that the prefill instance computes with exactly the tensors of the
decode instance.
"""

import shutil
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from coserve.devices.messages.commands import SaveAdapter
from coserve.engine.served_adapters import AdapterVersion
from coserve.engine.token_engine import TokenEngine
from coserve.handover.messages import AdapterFiles


def digest_of(directory: Path) -> str:
    """Return a digest of the names and contents of all files in a directory.

    Raises:
        OSError: A file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


class WrittenAdapters:
    """Adapter versions of a device, each written when a prompt first needs it; the least recently
    used ones are removed.
    """

    def __init__(self, engine: TokenEngine, directory: Path) -> None:
        self._engine, self._directory, self._most = engine, directory, engine.config.max_adapters
        self._files: OrderedDict[str, AdapterFiles] = OrderedDict()
        self._num_written = 0

    def files_of(self, version: AdapterVersion) -> AdapterFiles:
        """Return the files of a version, written now unless they exist.

        Raises:
            AdapterError, OSError: They cannot be written.
        """
        if version.key not in self._files:
            directory = self._directory / f"adapter-{self._num_written}"
            self._num_written += 1
            directory.mkdir()
            # Recorded here, since recordings leave the next command out.
            self._engine.flush_commands()
            self._engine.log.execute(SaveAdapter(version.key, str(directory)))
            self._files[version.key] = AdapterFiles(str(directory), digest_of(directory))
        self._files.move_to_end(version.key)
        while len(self._files) > self._most:
            _, old = self._files.popitem(last=False)
            shutil.rmtree(old.directory, ignore_errors=True)
        return self._files[version.key]
