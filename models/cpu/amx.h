// Tile registers (Intel AMX): permission, and the shapes of tiles that the kernels use.
//
// A tile product of bfloat16 does not round as the vector unit does, so a kernel uses tiles for every row count or for
// none. NOTE: tile registers belong to a thread, and other libraries (torch's oneDNN) shape or release them on the same
// threads: a job begins with forget(), and every operation calls shape() before it uses them.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define OCTAVO_AMX 1
#else
#define OCTAVO_AMX 0
#endif

// NOTE: the compiler does not know that the load intrinsic reads memory; without the barrier it may move or drop stores.
#define TILE_LOAD(tile, address, stride)   \
    do {                                   \
        asm volatile("" ::: "memory");     \
        _tile_loadd(tile, address, stride); \
    } while (0)

namespace octavo::amx {

// Whether the processor has tiles and the system lets this process use them. Asked when the library is loaded;
// allow(false), before anything is packed, has the kernels do without.
extern bool in_use;
INLINE bool available() { return OCTAVO_AMX && in_use; }
void allow(bool tiles);

// Every shape has result tiles 0-3.
enum Shape : int {
    LINEAR,     // results 16 outputs x n rows; 4 and 5: 16 outputs x 32 inputs, 6 and 7: 16 pairs of inputs x n rows
    ATTENTION,  // results n rows x 16; 4: n queries x 32 dims, 5: 16 dim pairs x 16 keys, 6: n rows x 16 weights, 7: 8 key pairs x 16 dims
};

void shape(Shape shape, int n);
void forget();

}  // namespace octavo::amx
