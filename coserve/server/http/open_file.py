"""Answers with the content of an open file, which may be deleted meanwhile."""

from typing import Any, BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send


class OpenFileResponse(FileResponse):
    """A `FileResponse` of an open file, which it closes."""

    def __init__(self, file: BinaryIO, **settings: Any) -> None:
        # Opened by this name, a file that has been deleted is there still.
        super().__init__(f"/dev/fd/{file.fileno()}", **settings)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
