"""Checks of clients' strings that are stored."""

from typing import Any

from coserve.server.errors import ApiError


def check_texts(value: Any, *, param: str) -> None:
    """Check strings, at any depth of a JSON value.

    Raises:
        ApiError: A string contains a lone surrogate or a NUL.
    """
    waiting = [value]
    while waiting:  # not by recursion: JSON may be as deep as Python's stack
        one = waiting.pop()
        if isinstance(one, str):
            if "\0" in one or any("\ud800" <= character <= "\udfff" for character in one):
                raise ApiError(
                    f"'{param}' contains an invalid character (a lone surrogate, or NUL).",
                    param=param,
                )
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
