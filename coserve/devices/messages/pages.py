"""Commands that copy pages: to and from host memory, in slots of a page's size, and to other pages.
See `coserve.devices.messages.commands`.
"""

import msgspec


class SwapOut(msgspec.Struct, tag=True, frozen=True):
    """Copy pages to slots of host memory, one to one: something else will come into the pages."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]


class SwapIn(msgspec.Struct, tag=True, frozen=True):
    """Copy slots back, to any pages."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]


class SwapOutTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Copy tensors that nothing runs with to slots of host memory, each right after the one before,
    and let go of them: the parameters of a version, or the moments of a job's optimizer. Nothing if
    they are there already, or gone.
    """

    version: str = ""
    job: str = ""
    slots: tuple[int, ...]


class SwapInTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The inverse, from the same slots. Nothing if they are back already; DeviceMemoryError brings
    nothing back.
    """

    version: str = ""
    job: str = ""
    slots: tuple[int, ...]


class MovePages(msgspec.Struct, tag=True, frozen=True):
    """Copy pages to others, one to one, where they are from now on for the requests that have them:
    something else is to come into their places. No page is both a source and a target.
    """

    pages: tuple[int, ...]
    targets: tuple[int, ...]


class MovePack(msgspec.Struct, tag=True, frozen=True):
    """The job's pack lies in other pages now: what was in its own has been copied there (`SwapOut`,
    `SwapIn`).

    runs: as those of `BeginPack`, of the groups of tensors that it still has, each as long as
    before.
    """

    job: str
    runs: tuple[tuple[int, int], ...]
