"""Groups of ranks: processes or threads that hold one copy of a model together, and the collectives
between them.

`base.py` says what a collective does. Each other file is one way to move the data (a transport),
found by its name.
"""

from coserve.discovery import variant_names


def transport_names() -> tuple[str, ...]:
    """Return the transports: the files here but for `base.py`, and those that begin with an
    underscore.
    """
    return variant_names(__path__)
