"""Files of a batch: its requests, one per line, and their results."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coserve.home import make_private
from coserve.jobs.files.shared_files import discard
from coserve.jobs.records import new_id
from coserve.server.batches.journal import BatchJournal, LineFile
from coserve.server.bodies.reader import named_once
from coserve.server.bodies.texts import check_texts
from coserve.server.errors import ApiError

MAX_REQUESTS = 50_000
_MAX_ERRORS = 10
_LONGEST_ID = 512
_LONGEST_LINE = 8 << 20
_FIELDS = {"custom_id", "method", "url", "body"}
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """Place of one request in its file."""

    custom_id: str
    """The client's id for the request."""
    start: int
    """Byte offset of the line."""
    num_bytes: int
    """Length of the line in bytes."""


def read_input(path: Path, endpoint: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return the requests of a file, and its first errors in OpenAI's form. Blocks."""
    lines: list[BatchLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        start = 0
        # One byte more than allowed shows that a line is too long without reading all of it.
        for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            if raw.strip():
                try:
                    lines.append(_line(raw, start, endpoint, seen))
                    if len(lines) > MAX_REQUESTS:
                        raise ApiError(
                            f"the file has more than {MAX_REQUESTS} requests",
                            code="too_many_requests",
                        )
                except ApiError as error:
                    errors.append(_error(error, number))
            # After a line that is too long, it is unknown where the next one starts.
            if len(errors) == _MAX_ERRORS or len(lines) > MAX_REQUESTS or len(raw) > _LONGEST_LINE:
                return lines, errors
            start += len(raw)
    if not lines and not errors:
        errors.append(_error(ApiError("the file has no requests", code="empty_file"), None))
    return lines, errors


def read_body(path: Path, line: BatchLine) -> Any:
    """Return the body of a request. Blocks."""
    with path.open("rb") as file:
        file.seek(line.start)
        return json.loads(file.read(line.num_bytes))["body"]


class BatchResults:
    """Results of a batch on disk: one line for each request that has been answered or given up.

    Methods block and may be called from any thread.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_private(directory)
        self._output, self._errors = LineFile(directory / OUTPUT), LineFile(directory / ERRORS)
        self.journal = BatchJournal(directory)

    def done(self) -> tuple[set[str], set[str]]:
        """Return the ids of requests that were answered, and of those that ended with an error."""
        return _ids(self._output), _ids(self._errors)

    def add(self, custom_id: str, status: int, request: str, body: Mapping[str, Any]) -> None:
        """Add an answer, or the error that a request was answered with."""
        response = {"status_code": status, "request_id": request, "body": body}
        (self._output if status == 200 else self._errors).append(_result(custom_id, response, None))

    def add_missing(self, custom_id: str, code: str, message: str) -> None:
        """Add a request that was not answered."""
        self._errors.append(_result(custom_id, None, {"code": code, "message": message}))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file; nothing if it does not exist."""
        return (self._output if name == OUTPUT else self._errors).chunks()

    def remove(self) -> None:
        """Remove all results."""
        discard(self._directory)


def _result(custom_id: str, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _line(raw: bytes, start: int, endpoint: str, seen: set[str]) -> BatchLine:
    if len(raw) > _LONGEST_LINE:
        raise ApiError(f"the line is longer than {_LONGEST_LINE} bytes", code="invalid_json_line")
    try:
        value = json.loads(raw, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            f"the line is not valid JSON: {str(error)[:200]}", code="invalid_json_line"
        ) from None
    if not isinstance(value, dict):
        raise ApiError("the line must be a JSON object", code="invalid_json_line")
    id = value.get("custom_id")
    if not isinstance(id, str) or not 0 < len(id) <= _LONGEST_ID:
        raise ApiError(
            f"custom_id must be a string of 1 to {_LONGEST_ID} characters", param="custom_id"
        )
    check_texts(id, param="custom_id")
    if id in seen:
        raise ApiError(
            f"custom_id {id[:100]!r} occurs twice", param="custom_id", code="duplicate_custom_id"
        )
    if unknown := sorted(value.keys() - _FIELDS):
        raise ApiError(
            f"Unknown parameter: '{unknown[0][:100]}'.", param=unknown[0], code="unknown_parameter"
        )
    if value.get("method") != "POST":
        raise ApiError("method must be POST", param="method", code="invalid_method")
    if value.get("url") != endpoint:
        raise ApiError(
            f"url must be {endpoint}, the batch's endpoint", param="url", code="mismatched_endpoint"
        )
    if not isinstance(value.get("body"), dict):
        raise ApiError("body must be an object", param="body", code="missing_required_parameter")
    seen.add(id)
    return BatchLine(custom_id=id, start=start, num_bytes=len(raw))


def _error(error: ApiError, line: int | None) -> dict[str, Any]:
    return {
        "code": error.code or "invalid_value",
        "line": line,
        "message": error.message,
        "param": error.param,
    }


def _ids(file: LineFile) -> set[str]:
    return {line["custom_id"] for line in file.read()}
