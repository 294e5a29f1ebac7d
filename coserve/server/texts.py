"""Text that clients bring and that is kept."""

from typing import Any

from coserve.server.errors import ApiError


def check_texts(value: Any, *, param: str) -> None:
    """Refuse strings, at any depth, that are no text: half a character (a lone surrogate), or a NUL."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise ApiError(f"'{param}' holds a character that is none (a lone surrogate, or NUL).", param=param)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_texts(name, param=param)
            check_texts(item, param=param)
    elif isinstance(value, list | tuple):
        for item in value:
            check_texts(item, param=param)
