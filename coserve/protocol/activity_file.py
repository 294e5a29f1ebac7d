"""The layout of the file by which an engine's process leaves word of the jobs that it works for.

A head, then two slots of ids, each of which ends with a zero: the process may die while it writes
one of them.
"""

import struct

HEAD = struct.Struct("<IB")
"""The process's number, and which of the two slots counts."""
SLOT_BYTES = 4096
FILE_BYTES = HEAD.size + 2 * SLOT_BYTES
