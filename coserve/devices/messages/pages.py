"""Commands that copy pages, to and from slots of a page's size in host memory, and to other pages.

See `commands.py` for the rest.
"""

import msgspec


class SwapOut(msgspec.Struct, tag=True, frozen=True):
    """Command to copy pages to slots of host memory, one to one; the pages are then free for
    others.
    """

    pages: tuple[int, ...]
    """Pages to copy."""
    slots: tuple[int, ...]
    """Slot for each page."""


class SwapIn(msgspec.Struct, tag=True, frozen=True):
    """Command to copy slots of host memory to pages, one to one."""

    pages: tuple[int, ...]
    """Page for each slot; any pages will do."""
    slots: tuple[int, ...]
    """Slots to copy."""


class SwapOutTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Command to copy tensors that nothing runs with to slots of host memory, end to end, and to
    free them.

    They are the parameters of a version, or the moments of a job's optimizer. Nothing happens if
    they are there already, or gone.
    """

    version: str = ""
    """Id of the version; "": a job's moments."""
    job: str = ""
    """Id of the job; "": a version's parameters."""
    slots: tuple[int, ...]
    """Slots for the tensors."""


class SwapInTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Command to copy tensors back from the same slots; nothing happens if they are back already.

    Raises:
        DeviceMemoryError: There is too little memory; nothing is copied back.
    """

    version: str = ""
    """Id of the version; "": a job's moments."""
    job: str = ""
    """Id of the job; "": a version's parameters."""
    slots: tuple[int, ...]
    """Slots that hold the tensors."""


class MovePages(msgspec.Struct, tag=True, frozen=True):
    """Command to copy pages of requests to others, which take their place in the page tables."""

    pages: tuple[int, ...]
    """Pages to copy; none of them is a target."""
    targets: tuple[int, ...]
    """Target for each page."""


class MovePack(msgspec.Struct, tag=True, frozen=True):
    """Command to use a job's pack in other pages, to which its content has been copied (`SwapOut`,
    `SwapIn`).
    """

    job: str
    """Id of the job."""
    runs: tuple[tuple[int, int], ...]
    """First page and number of pages of each group of tensors that the pack still has (see
    `BeginPack`), as long as before.
    """
