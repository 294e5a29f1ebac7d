"""HTTP client of a server, for commands and the load generator.

It is deliberately small: users' programs use the `openai` client. This one needs only httpx, and
turns every failure into one line.
"""

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from coserve.errors import DataError, RequestError, ServerError

DEFAULT_URL = "http://127.0.0.1:8000"

# Seconds until a connection stands; and between two pieces of an answer: a busy engine may take
# long to the first.
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
_JSON = {"Content-Type": "application/json"}
_PER_PAGE = 100


class Client:
    """Client of one server; it must not be shared by threads.

    Methods raise ServerError with one line, and RequestError for a body that cannot be sent.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        """Connect to a server.

        Args:
            url: URL of the server, with or without `/v1`.
            api_key: API key, if the server needs one.

        Raises:
            ServerError: The URL or the key is invalid.
        """
        self.url = base_url(url)
        self._http = httpx.Client(
            base_url=self.url, headers=auth_headers(api_key), timeout=_TIMEOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """Return the JSON of an answer to GET; parameters that are None are left out."""
        return self._send(
            "GET", path, params={name: value for name, value in params.items() if value is not None}
        )

    def each(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the items of a paginated list, the newest first; pages are fetched as needed."""
        after: str | None = None
        while True:
            page = self.get(path, after=after, limit=_PER_PAGE)
            yield from page["data"]
            if not page.get("has_more") or not page["data"]:
                return
            after = page["data"][-1]["id"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer to POST."""
        return self._send("POST", path, content=_encoded(body or {}), headers=_JSON)

    def delete(self, path: str) -> Any:
        """Return the JSON of an answer to DELETE."""
        return self._send("DELETE", path)

    def content(self, file_id: str) -> bytes:
        """Return the content of a stored file."""
        try:
            answer = self._http.get(f"/v1/files/{file_id}/content")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.is_error:
            raise refusal(answer.status_code, answer.content)
        return answer.content

    def upload(self, path: Path, purpose: str = "fine-tune") -> dict[str, Any]:
        """Upload a file, and return its record.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            with path.open("rb") as file:
                record: dict[str, Any] = self._send(
                    "POST",
                    "/v1/files",
                    files={"file": (path.name, file)},
                    data={"purpose": purpose},
                )
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        return record

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer as they arrive; closing the iterator cancels the
        request.
        """
        try:
            content = _encoded({**body, "stream": True})
            with self._http.stream("POST", path, content=content, headers=_JSON) as answer:
                if answer.is_error:
                    raise refusal(answer.status_code, answer.read())
                for line in answer.iter_lines():
                    chunk = chunk_of(line)
                    if chunk is not None:
                        yield chunk
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _send(self, method: str, path: str, **content: Any) -> Any:
        try:
            answer = self._http.request(method, path, **content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.is_error:
            raise refusal(answer.status_code, answer.content)
        try:
            return answer.json()
        except ValueError:
            raise ServerError(
                f"{self.url}{path} did not answer with JSON: is it a coserve server?"
            ) from None

    def _unreachable(self, error: Exception) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(
                f"no server at {self.url}: start one with `coserve up`, or name one with --url"
            )
        return ServerError(f"{self.url}: {_one_line(error) or type(error).__name__}")


def base_url(url: str) -> str:
    """Return a URL without `/v1` and slashes at its end.

    Raises:
        ServerError: It is not a URL of a server.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise ServerError(
            f"{url!r} is not a URL of a server: it must begin with http:// or https://"
        )
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL as error:
        raise ServerError(f"{url!r} is not a URL of a server: {error}") from None
    if not host:
        raise ServerError(
            f"{url!r} is not a URL of a server: it must have a host, such as {DEFAULT_URL}"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Return the authorization header of OpenAI's API.

    Raises:
        ServerError: A header cannot contain the key, which is not shown.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ServerError("the API key is invalid: a key must be ASCII without line breaks")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def chunk_of(line: str) -> dict[str, Any] | None:
    """Return the chunk of a line of server-sent events; None for empty lines, comments and the last
    event.

    Raises:
        ServerError: The stream says that the request failed.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    try:
        chunk: dict[str, Any] = json.loads(data)
    except ValueError:
        raise ServerError(f"the stream has a line that is not JSON: {data[:80]}") from None
    if "error" in chunk:
        raise ServerError(_message(chunk) or "the request failed")
    return chunk


def _encoded(body: dict[str, Any]) -> bytes:
    """Return a body as bytes.

    Raises:
        RequestError: JSON cannot represent a field; the message names it.
    """
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise RequestError("; ".join(_faults(body, ""))) from None


def _faults(value: Any, place: str) -> Iterator[str]:
    """Yield what JSON cannot represent: numbers that are not finite, and text that is not UTF-8."""
    if isinstance(value, float) and not isfinite(value):
        yield f"{place} must be a finite number, not {value}"
    elif isinstance(value, str) and value.encode(errors="replace") != value.encode(
        errors="surrogatepass"
    ):
        yield f"{place} must be UTF-8, not {value!r}"
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _faults(each, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _faults(each, f"{place}[{number}]")


def refusal(status: int, content: bytes) -> ServerError:
    """Return the error of an answer, with the server's message."""
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = None
    return ServerError(message or f"the server answered with status {status}", status=status)


def _message(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return _one_line(message) if message else None


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
