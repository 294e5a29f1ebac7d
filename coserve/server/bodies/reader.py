"""Parsing of bodies into the objects that routes take.

Large bodies are parsed in a thread, so that other requests do not wait, and only the first fault is
reported.
"""

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope

from coserve.server.bodies.faults import no_json, validation_error
from coserve.server.bodies.other_fields import FieldPolicy
from coserve.server.errors import ApiError

# Bytes that are read sooner than a thread could begin to.
SMALL_BODY_BYTES = 1 << 16
_MAX_REASON = 200
B = TypeVar("B", bound=BaseModel)


class BodyReader:
    """Parser of bodies, with one thread for large ones.

    Parsing holds the interpreter's lock; two threads would only halve the time of everything else.
    """

    def __init__(self, fields: FieldPolicy) -> None:
        """Create a parser.

        Args:
            fields: Decision on fields that a kind of body does not have.
        """
        self._fields = fields
        self._thread = ThreadPoolExecutor(1, "big bodies")

    async def read(self, kind: type[BaseModel], body: bytes) -> BaseModel:
        """Return the object that a body describes.

        Raises:
            ApiError: It has a fault; the first one is named.
        """
        if len(body) <= SMALL_BODY_BYTES:
            return read_body(kind, body, self._fields)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _read_big, kind, body, self._fields
        )

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _read_big(kind: type[BaseModel], body: bytes, fields: FieldPolicy) -> BaseModel:
    """Parse a body without the garbage collector, which would traverse millions of new objects
    repeatedly.
    """
    gc.disable()
    try:
        return read_body(kind, body, fields)
    finally:
        gc.enable()


def read_body(kind: type[B], body: bytes, fields: FieldPolicy | None = None) -> B:
    """Return the object that a body describes.

    Args:
        kind: Class of the object.
        body: Bytes of the body.
        fields: As for `body_of`.

    Raises:
        ApiError: The body is not a JSON object, has a field twice, or does not describe an object
            of that kind.
    """
    try:
        # Given bytes, `json` would accept UTF-16 and lone surrogates as well.
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=named_once)
    except RecursionError:
        raise no_json("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise no_json(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise no_json(str(error)[:_MAX_REASON]) from None
    except ValueError:  # raised by `int`
        raise no_json(f"a number has more than {sys.get_int_max_str_digits()} digits") from None
    return body_of(kind, value, fields)


def body_of(kind: type[B], value: Any, fields: FieldPolicy | None = None) -> B:
    """Return the object that a JSON value describes.

    Args:
        kind: The class of the object.
        value: Parsed JSON.
        fields: Decides on fields that a `RequestBody` does not have; without, unknown fields are
            refused.

    Raises:
        ApiError: The value does not describe an object of that kind.
    """
    try:
        return kind.model_validate(value, context=fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        # As FastAPI places what it finds in queries.
        raise validation_error(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in faults], kind.model_fields
        ) from None


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ApiError: Two values have the same name.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ApiError(
            f"The request's body names {twice!r} twice in one object.", code="invalid_json"
        )
    return value


class JsonRoute(APIRoute):
    """A route whose body is parsed by the server's `BodyReader` instead of FastAPI.

    FastAPI would parse it on the event loop, and list every fault. The schema at /openapi.json is
    the same.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive, kind))

        return read_and_handle


class _JsonRequest(Request):
    """A request whose JSON is already the parsed object, which FastAPI takes as it is."""

    def __init__(self, scope: Scope, receive: Receive, kind: Any) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:
        reader: BodyReader = self.app.state.context.bodies
        return await reader.read(self._kind, await self.body())
