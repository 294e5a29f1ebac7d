"""Requests and jobs as policies see them, for tests: every number by its name, whether it stays the
same or changes."""

import dataclasses
from typing import Any, TypeVar

from msgspec import structs

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.plan import JobInfo, JobPhase, JobProgress, RequestInfo, RequestProgress

T = TypeVar("T", RequestProgress, JobProgress)


def make_request(id: str, **fields: Any) -> RequestProgress:
    """Return a request; fields: of its `RequestInfo` and of its `RequestProgress`."""
    info = {name: fields.pop(name) for name in RequestInfo.__struct_fields__ if name in fields}
    return RequestProgress(id=id, info=RequestInfo(**info), **fields)


def changed(item: T, **fields: Any) -> T:
    """Return a request or a job with other fields, its own or its info's."""
    info = {name: fields.pop(name) for name in item.info.__struct_fields__ if name in fields}
    if isinstance(item, RequestProgress):
        return dataclasses.replace(item, info=structs.replace(item.info, **info), **fields)
    return structs.replace(item, info=structs.replace(item.info, **info), **fields)


def make_job(
    id: str, phase: JobPhase | str, *, counts: JobCounts, tenant: str = "", **fields: Any
) -> JobProgress:
    """Return a job; fields: of its `JobProgress`."""
    return JobProgress(id=id, info=JobInfo(counts=counts, tenant=tenant), phase=phase, **fields)  # type: ignore[arg-type]
