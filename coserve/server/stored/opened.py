"""Parts of a server that exist once it has opened its store."""

from typing import Generic, TypeVar

from coserve.errors import EngineGoneError

T = TypeVar("T")


class Opened(Generic[T]):
    """A part of a server that is not there until its store is open.

    `value` is None until then; the start of the server sets it.
    """

    def __init__(self) -> None:
        self.value: T | None = None

    def require(self) -> T:
        """Return the part.

        Raises:
            EngineGoneError: The server is still starting.
        """
        if self.value is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return self.value
