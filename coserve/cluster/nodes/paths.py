"""Translation of paths: a node whose files come by a URL has in its own home, by the same names,
what the front has in another.
"""

import dataclasses
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from coserve.engine.commands import (
    AdapterRef,
    AddRequest,
    CombineJob,
    JobStart,
    LoadAdapter,
    StartJob,
)
from coserve.protocol.messages import StepReport

# What engines read and write in a home; all else is for the front, or lies on every machine.
_SHARED = "jobs"


class NodePaths:
    """Paths of a front's home and of a node's."""

    def __init__(self, front: Path, node: Path) -> None:
        self._front = front / _SHARED
        self._node = node / _SHARED

    def here(self, command: Any) -> Any:
        """Return a command of the front with paths of this node."""
        if isinstance(command, AddRequest | LoadAdapter) and command.adapter is not None:
            return replace(command, adapter=self._adapter(command.adapter))
        if isinstance(command, StartJob):
            return replace(command, job=self._job(command.job))
        if isinstance(command, CombineJob):
            directories = tuple(map(self._path, command.combination.directories))
            return replace(
                command,
                combination=dataclasses.replace(command.combination, directories=directories),
            )
        return command

    def there(self, report: Any) -> Any:
        """Return a report of the engine with paths of the front."""
        if not isinstance(report, StepReport):
            return report
        return replace(
            report,
            checkpoints=[
                dataclasses.replace(each, directory=self._back(each.directory))
                for each in report.checkpoints
            ],
            contributions=[
                dataclasses.replace(each, directory=self._back(each.directory))
                for each in report.contributions
            ],
        )

    def _job(self, job: JobStart) -> JobStart:
        shard = job.shard
        return dataclasses.replace(
            job,
            examples=self._path(job.examples),
            validation=None if job.validation is None else self._path(job.validation),
            start=None if job.start is None else self._adapter(job.start),
            checkpoint=None if job.checkpoint is None else self._path(job.checkpoint),
            checkpoints=self._path(job.checkpoints),
            shard=None
            if shard is None
            else dataclasses.replace(shard, directory=self._path(shard.directory)),
        )

    def _adapter(self, adapter: AdapterRef) -> AdapterRef:
        if adapter.directory is None:
            return adapter
        return dataclasses.replace(adapter, directory=self._path(adapter.directory))

    def _path(self, path: str) -> str:
        return _moved(path, self._front, self._node)

    def _back(self, path: str) -> str:
        return _moved(path, self._node, self._front)


def _moved(path: str, old: Path, new: Path) -> str:
    return str(new / Path(path).relative_to(old)) if Path(path).is_relative_to(old) else path
