"""Layout of the file in which an engine's process notes the jobs that it works for, for when it
dies.

A header is followed by two slots of ids, each terminated by a zero: the process may die while it
writes one of them.
"""

import struct

HEAD = struct.Struct("<IB")
"""The process's number, and which of the two slots counts."""
SLOT_BYTES = 4096
FILE_BYTES = HEAD.size + 2 * SLOT_BYTES
