"""Style, script and icon of the page; browsers revalidate them by a tag."""

from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

from starlette.responses import Response

from coserve.server.page.rendering import HEADERS

PATH = "/ui/static/"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def names() -> tuple[str, ...]:
    """Return the names of all files."""
    return tuple(sorted(each.name for each in files(__package__).joinpath("static").iterdir()))


def asset(name: str, known_tag: str | None) -> Response | None:
    """Return the answer with a file; None if there is no file of this name.

    Args:
        name: Name of the file.
        known_tag: Tag that the browser has.
    """
    if name not in names():
        return None
    content, tag = _read(name)
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
    if known_tag == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[PurePath(name).suffix])


@cache
def _read(name: str) -> tuple[bytes, str]:
    content = files(__package__).joinpath("static", name).read_bytes()
    return content, f'"{sha256(content).hexdigest()[:32]}"'
