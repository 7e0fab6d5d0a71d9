#include "amx.h"
#if OCTAVO_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo::amx {

#if OCTAVO_AMX

static bool granted() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2), Linux 5.16 and later
    static const bool answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return answer;
}

bool in_use = granted();

void allow(bool tiles) { in_use = tiles && granted(); }

struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void tile(int number, int count, int bytes) { rows[number] = (uint8_t)count, row_bytes[number] = (uint16_t)bytes; }
};

static thread_local int current = -1;  // what this thread's tiles are shaped for, as far as we know

void forget() { current = -1; }

void shape(Shape shape, int n) {
    if (current == 32 * shape + n) return;
    current = 32 * shape + n;
    Config c;
    if (shape == LINEAR) {
        for (int i = 0; i < 8; i++) c.tile(i, 16, i == 4 || i == 5 ? 64 : 4 * n);
    } else {
        for (int i = 0; i < 4; i++) c.tile(i, n, 64);
        c.tile(4, n, 64);
        c.tile(5, 16, 64);
        c.tile(6, n, 32);
        c.tile(7, 8, 64);
    }
    asm volatile("" ::"r"(&c) : "memory");  // the intrinsic does not tell the compiler that it reads all of c
    _tile_loadconfig(&c);
}

#else

bool in_use = false;

void allow(bool) {}
void shape(Shape, int) {}
void forget() {}

#endif

}  // namespace octavo::amx
