"""Text that clients bring and that is kept."""

from typing import Any

from coserve.server.errors import ApiError


def check_texts(value: Any, *, param: str) -> None:
    """Refuse strings, at any depth, that are no text: half a character (a lone surrogate), or a
    NUL.
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
