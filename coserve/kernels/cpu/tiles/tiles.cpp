// Whether the system grants products of tiles, and by which instructions.

#include "tiles/tiles.h"

#ifdef HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

// Linux: arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA.
extern "C" int request_tiles() {
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? TILES_BY_AMX : NO_TILES;
}

#elif defined(HAS_TILES)

extern "C" int request_tiles() { return TILES_BY_PAIRS; }

#else

extern "C" int request_tiles() { return NO_TILES; }

#endif
