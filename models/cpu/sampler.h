// Turns one row of logits into a token and its logprobs, as models/sampling.py defines it. Rows are independent.
//
// Knows nothing of threads: a caller may run different rows on different threads, each with a scratch of its own.
// The C structures are mirrored in sampling_abi.py.
#pragma once
#include <cstdint>
#include <vector>

namespace octavo {

// models.sampling.SamplingBatch. Pointers may be null where a field there may be None.
struct SamplingView {
    int32_t rows, vocab, num_logprobs, biases;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k, *position, *target, *row_logprobs;
    const int64_t* seed;
    const float *presence, *frequency, *repetition;
    const int32_t *counts, *count_row;  // counts: [_, vocab]
    const int32_t *bias_row, *bias_token;
    const float* bias_value;
    const uint32_t* mask;  // [_, (vocab + 31) / 32]
    const int32_t* mask_row;
};

// Where the results go. All but `tokens` may be null when num_logprobs is -1.
struct SampleOutput {
    int32_t* tokens;      // [rows]
    float* logprobs;      // [rows]
    int32_t* top_ids;     // [rows, num_logprobs]
    float* top_logprobs;  // [rows, num_logprobs]
};

// Memory of one thread, kept between rows.
struct SampleScratch {
    std::vector<float> logits, scaled, weights, maxima, sorted_maxima;
    std::vector<uint64_t> keys;

    void fit(int vocab);
};

// One row: `logits` is [vocab], `row` its place in the view and in the output.
void sample_row(const float* logits, int vocab, const SamplingView& b, int row, SampleScratch& scratch, const SampleOutput& out);

}  // namespace octavo
