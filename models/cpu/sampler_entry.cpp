// The sampler and its noise as C functions: to sample logits that another runner made, and to test them.
#include "sampler.h"

using namespace octavo;

extern "C" {

// Sizes of the structures, for the mirror to compare itself with.
void octavo_sampler_sizes(int32_t* out) {
    out[0] = sizeof(SamplingView);
    out[1] = sizeof(SampleOutput);
}

// All rows of `logits` [rows, vocab], one after the other on this thread.
void octavo_sample(const float* logits, const SamplingView* view, const SampleOutput* output) {
    SampleScratch scratch;
    for (int row = 0; row < view->rows; row++) sample_row(logits + (size_t)row * view->vocab, view->vocab, *view, row, scratch, *output);
}

void octavo_philox(uint32_t* counter, const uint32_t* key) { philox(counter, key[0], key[1]); }

// The bits and the noise of one row's tokens, the bits from the vector code, the noise from the scalar code.
void octavo_noise(int64_t seed, int32_t position, int32_t vocab, uint32_t* bits, float* uniform, float* gumbel, float* bound) {
    const Noise noise(seed, position);
    for (int first = 0; first < vocab; first += 2 * lanes::WIDTH) {
        lanes::Words words[2];
        noise.bits(first, words);
        for (int i = first; i < vocab && i < first + 2 * lanes::WIDTH; i++) {
            const lanes::Words w = words[(i - first) / lanes::WIDTH];
            const lanes::Floats v = Noise::uniform(w);
            const int lane = (i - first) % lanes::WIDTH;
            bits[i] = w[lane], uniform[i] = v[lane], bound[i] = Noise::gumbel_bound(v)[lane];
            gumbel[i] = Noise::gumbel(noise.bits(i));
        }
    }
}

// exp of n floats that are not positive.
void octavo_exp(const float* x, int32_t n, float* out) {
    for (int i = 0; i < n; i++) out[i] = lanes::exp_nonpositive(lanes::splat(x[i]))[0];
}
}
