// Tile registers (Intel AMX): permission, and the few shapes of tiles that the kernels use.
//
// A tile product of int8 is exact, so the integer kernels give the same bits with and without tiles and may choose by the
// number of rows. A tile product of bfloat16 is not the vector unit's, so those kernels use tiles for every row count or
// for none. NOTE: tile registers belong to a thread; call shape() before using them, whatever ran before.
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

// Whether the processor has tiles and the kernel lets this process use them. Asked once.
bool available();

// R rows of results at a time. Every shape has result tiles 0-3 of R rows x 16 numbers.
enum Shape : int {
    INT8_GROUP,  // 4: R rows x 32 int8, 5 and 6: 8 rows x 64 bytes of weights
    BF16,        // 4: R rows x 32 bfloat16, 5 and 6: 16 rows x 64 bytes of weights
    ATTENTION,   // 4: R queries x 32 dims, 5: 16 dim pairs x 16 keys, 6: R rows x 16 weights, 7: 8 key pairs x 16 dims
};

void shape(Shape shape, int rows);

}  // namespace octavo::amx
