"""HTTP by hand, a connection for each request: cheap enough for hundreds at once, and what breaks
is seen as it is."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class NoAnswerError(Exception):
    """The connection was refused, or ended before the answer did."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """body: sent as JSON; content: as it is."""

    method: str = "POST"
    path: str
    body: Mapping[str, Any] | None = None
    content: bytes = b""
    content_type: str = "application/json"

    def encoded(self) -> bytes:
        content = self.content if self.body is None else json.dumps(self.body).encode()
        head = (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The data of server-sent events."""
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]


def upload(content: bytes, *, purpose: str = "fine-tune", filename: str = "data.jsonl") -> Request:
    """Return the upload of a file."""
    mark = "storm-boundary"
    head = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    form = head.encode() + content + f"\r\n--{mark}--\r\n".encode()
    return Request(
        path="/v1/files", content=form, content_type=f"multipart/form-data; boundary={mark}"
    )


async def ask(port: int, request: Request, *, limit_s: float) -> Answer:
    """NoAnswerError, or TimeoutError after that time."""
    async with asyncio.timeout(limit_s):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            raise NoAnswerError(f"no connection: {error}") from None
        try:
            writer.write(request.encoded())
            return await _read(reader)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise NoAnswerError(repr(error)) from None
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Answer:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return Answer(status=status, headers=headers, body=b"".join(parts))
    return Answer(
        status=status,
        headers=headers,
        body=await reader.readexactly(int(headers["content-length"])),
    )
