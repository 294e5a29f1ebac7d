"""Homes made by hand, without a server: records, blobs and directories as jobs would leave them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from coserve.engine.jobs.checkpoint import POSITION_FILE
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.lifecycle.catalogue import JobAdapters
from coserve.jobs.maintenance.offline import job_writer_at
from coserve.jobs.records import CheckpointRecord, FileRecord, JobRecord, adapter_of, new_id
from coserve.jobs.sql.store import Store

TENANT = "a"


class HandMade:
    """A home with a store."""

    def __init__(self, path: Path, database: str | None = None) -> None:
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        self.store = Store.at(path, database)
        self.files = Files(self.store, path / "files")
        self.writer = job_writer_at(self.store, path)
        self.adapters = JobAdapters(self.store, "m", Folders(path / "jobs"))

    def upload(self, content: bytes = b"abc", purpose: str = "fine-tune") -> FileRecord:
        return self.files.create(
            TENANT, purpose=purpose, filename="data.jsonl", source=io.BytesIO(content)
        )

    def job(self, *, status: str = "running", **fields: Any) -> JobRecord:
        """A job of ten steps, validated, with its examples on disk."""
        from coserve.jobs.settings import JobSettings

        given: dict[str, Any] = {
            "created_at": 1,
            "model": "m",
            "base": "m",
            "seed": 0,
            "num_examples": 3,
            "num_steps": 10,
            "tenant": TENANT,
        }
        id = new_id("ftjob-")
        settings = JobSettings().to_data()
        given |= {
            "id": id,
            "name": f"ft:{id}",
            "training_file": self.upload().id,
            "settings": settings,
            "status": status,
        }
        record = JobRecord(**given | fields)
        if (
            not record.is_terminal
        ):  # on disk first, as the manager has it: a backup may be made between the two
            self.folder(record).mkdir(parents=True)
            (self.folder(record) / "examples.msgpack").write_bytes(b"examples")
        with self.store.write() as transaction:
            transaction.add_job(record)
        return record

    def folder(self, job: JobRecord) -> Path:
        return self.path / "jobs" / job.id

    def checkpoint(
        self, job: JobRecord, step: int, *, listed: bool = True, directory: Path | None = None
    ) -> Path:
        """Write a complete checkpoint to disk and into the store."""
        directory = directory or self.folder(job) / "checkpoints" / f"step-{step}"
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
        (directory / POSITION_FILE).write_text(json.dumps({"num_steps_done": step}))
        for name in ("adapter_model", "optimizer"):
            save_file(
                {"x": np.full(100, step, dtype=np.float32)}, directory / f"{name}.safetensors"
            )
        with self.store.write() as transaction:
            name = f"{job.name}:ckpt-step-{step}"
            given: dict[str, Any] = {
                "job": job.id,
                "tenant": job.tenant,
                "created_at": 1,
                "step": step,
                "name": name,
            }
            record = CheckpointRecord(
                id=new_id("ftckpt_"), directory=str(directory), listed=listed, **given
            )
            transaction.put_checkpoint(record)
            transaction.change_job(job.id, num_steps_done=step)
            if listed:
                transaction.put_adapter(adapter_of(job, name, str(directory)))
        return directory

    def close(self) -> None:
        self.store.close()
