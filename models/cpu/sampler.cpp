// One row of logits to a token and its logprobs.
//
// Every filter keeps the beginning of one order (larger logit first, then lower id), so a filter is just a boundary in
// that order, and one scan finds the winner among what is not beyond it. That scan computes the exact noise of a token
// only where a cheap upper bound says that the token could win: a handful of times per row.
#include <algorithm>
#include <functional>
#include <limits>
#include "sampler.h"
#include "sampler_noise.h"

namespace octavo {

namespace {

using lanes::Floats;
using lanes::WIDTH;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int BLOCK = 64 * WIDTH;  // tokens whose sums and maxima are folded together
constexpr int BINS = 512;          // of the histogram that finds where the mass reaches top_p
constexpr double TOP_P_SLACK = 1e-6;
constexpr int32_t COUNT_MASK = (1 << 30) - 1;

// Calls body(first, lanes) for the row's vectors in order; what is missing of the last one reads as -inf.
template <class Body>
LANES_INLINE void each_vector(const float* x, int begin, int end, const Body& body) {
    int i = begin;
    for (; i + WIDTH <= end; i += WIDTH) body(i, lanes::load(x + i));
    if (i < end) body(i, lanes::load_part(x + i, end - i, -INF));
}

// A token and its logit as one integer: larger logit first, then lower id, is descending order. -0 equals +0.
LANES_INLINE uint64_t key_of(float logit, int32_t id) {
    const float x = logit + 0.0f;
    uint32_t u;
    std::memcpy(&u, &x, 4);
    u ^= (u >> 31) ? 0xffffffffu : 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - (uint32_t)id);
}
LANES_INLINE int32_t id_of(uint64_t key) { return (int32_t)(0xffffffffu - (uint32_t)key); }
LANES_INLINE float logit_of(uint64_t key) {
    uint32_t u = (uint32_t)(key >> 32);
    u ^= (u >> 31) ? 0x80000000u : 0xffffffffu;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// --- penalties, bias and mask

// l > 0 ? l / repetition : l * repetition for tokens seen, less frequency * count, less presence if the count is not 0.
void penalise(const float* x, int vocab, const int32_t* counts, float repetition, float frequency, float presence, float* out) {
    auto apply = [&](Floats l, lanes::Ints count) {
        const Floats times = __builtin_convertvector(count & COUNT_MASK, Floats);
        const Floats repeated = l > 0.0f ? l / repetition : l * repetition;
        l = count != 0 ? repeated : l;
        l = l - times * frequency;
        return l - (times > 0.0f ? lanes::splat(presence) : Floats{});
    };
    int i = 0;
    for (; i + WIDTH <= vocab; i += WIDTH) lanes::store(out + i, apply(lanes::load(x + i), lanes::load(counts + i)));
    for (; i < vocab; i++) out[i] = apply(lanes::splat(x[i]), lanes::Ints{} + counts[i])[0];
}

// out[t] = x[t] where the bit of t is set, else -inf. `out` may be x.
void keep_allowed(const float* x, int vocab, const uint32_t* mask, float* out) {
    lanes::Words bit;
    for (int i = 0; i < WIDTH; i++) bit[i] = 1u << i;
    int i = 0;
    for (; i + WIDTH <= vocab; i += WIDTH) {
        const lanes::Words word = lanes::Words{} + (mask[i / 32] >> i % 32);  // WIDTH divides 32
        lanes::store(out + i, (word & bit) != 0 ? lanes::load(x + i) : lanes::splat(-INF));
    }
    for (; i < vocab; i++) out[i] = mask[i / 32] >> i % 32 & 1 ? x[i] : -INF;
}

// The row after penalties, bias and mask: x itself where nothing changes it.
const float* processed(const float* x, int vocab, const SamplingView& b, int row, SampleScratch& scratch) {
    float* out = scratch.logits.data();
    const bool penalised = b.count_row && b.count_row[row] >= 0;
    if (penalised)
        penalise(x, vocab, b.counts + (size_t)b.count_row[row] * b.vocab, b.repetition[row], b.frequency[row], b.presence[row], out);
    const float* now = penalised ? out : x;
    const int32_t* last = b.bias_row + b.biases;
    const int32_t* first = b.biases ? std::lower_bound(b.bias_row, last, row) : last;
    if (first != last && *first == row) {
        if (now != out) std::memcpy(out, x, sizeof(float) * vocab);
        now = out;
        for (ptrdiff_t i = first - b.bias_row; i < b.biases && b.bias_row[i] == row; i++)
            if (b.bias_token[i] >= 0 && b.bias_token[i] < vocab) out[b.bias_token[i]] += b.bias_value[i];
    }
    if (!b.mask_row || b.mask_row[row] < 0) return now;
    keep_allowed(now, vocab, b.mask + (size_t)b.mask_row[row] * ((vocab + 31) / 32), out);
    return out;
}

// --- the peak

struct Peak {
    float logit;
    int32_t id;   // the lowest with that logit
    bool usable;  // no NaN, no +inf, and something above -inf
};

// Also leaves, in scratch.maxima, the maxima of WIDTH interleaved groups of each block.
Peak find_peak(const float* x, int vocab, SampleScratch& scratch) {
    lanes::Ints nan = {};
    float* maxima = scratch.maxima.data();
    Floats highest = lanes::splat(-INF);
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        Floats m[4];
        for (Floats& v : m) v = lanes::splat(-INF);
        int turn = 0;
        each_vector(x, begin, std::min(begin + BLOCK, vocab), [&](int, Floats v) {
            m[turn & 3] = lanes::larger(v, m[turn & 3]);
            nan |= v != v;
            turn++;
        });
        const Floats block = lanes::larger(lanes::larger(m[0], m[1]), lanes::larger(m[2], m[3]));
        lanes::store(maxima + begin / BLOCK * WIDTH, block);
        highest = lanes::larger(block, highest);
    }
    Peak peak{-INF, 0, true};
    for (int i = 0; i < WIDTH; i++) peak.logit = std::max(peak.logit, highest[i]), peak.usable &= nan[i] == 0;
    peak.usable &= peak.logit > -INF && peak.logit < INF;
    if (!peak.usable) return peak;
    const int group = (int)(std::find(maxima, maxima + scratch.maxima.size(), peak.logit) - maxima);
    peak.id = group / WIDTH * BLOCK;
    while (x[peak.id] != peak.logit) peak.id++;
    return peak;
}

// --- candidates

// Logits become (logit - shift) * scale: at most 0, and the same numbers wherever they are needed.
struct Scale {
    float shift, factor;

    LANES_INLINE Floats operator()(Floats x) const { return (x - shift) * factor; }
    LANES_INLINE float operator()(float x) const { return (x - shift) * factor; }
};

// The keys of the tokens whose scaled logit is at least `floor`, in order of id. Returns how many.
int collect(const float* x, int vocab, Scale scale, float floor, uint64_t* keys) {
    int n = 0;
    const Floats least = lanes::splat(floor);
    each_vector(x, 0, vocab, [&](int first, Floats v) {
        for (uint32_t bits = lanes::at_least(scale(v), least); bits; bits &= bits - 1) {
            const int id = first + __builtin_ctz(bits);
            if (id < vocab) keys[n++] = key_of(x[id], id);
        }
    });
    return n;
}

// The keys of the first k tokens of the order, the k-th at [k - 1], sorted if asked. `scratch.maxima` is of this row.
const uint64_t* first_tokens(const float* x, int vocab, int k, bool sorted, SampleScratch& scratch) {
    uint64_t* keys = scratch.keys.data();
    const int groups = (vocab + BLOCK - 1) / BLOCK * WIDTH;
    float floor = -INF;
    if (k <= groups) {  // k groups reach up to the k-th largest of their maxima, so k tokens do
        float* m = scratch.sorted_maxima.data();
        std::copy(scratch.maxima.data(), scratch.maxima.data() + groups, m);
        std::nth_element(m, m + k - 1, m + groups, std::greater<float>());
        floor = m[k - 1];
    }
    const int n = collect(x, vocab, {0.0f, 1.0f}, floor, keys);
    std::nth_element(keys, keys + k - 1, keys + n, std::greater<uint64_t>());
    if (sorted) std::sort(keys, keys + k, std::greater<uint64_t>());
    return keys;
}

// The sum of exp(scaled logit) over tokens whose scaled logit is at least `floor`.
double mass(const float* x, int vocab, Scale scale, float floor) {
    double total = 0;
    const Floats least = lanes::splat(floor);
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        Floats block = {};
        each_vector(x, begin, std::min(begin + BLOCK, vocab), [&](int, Floats v) {
            const Floats s = scale(v);
            block += s >= least ? lanes::exp_nonpositive(s) : Floats{};
        });
        total += lanes::sum(block);
    }
    return total;
}

// --- top_p

// Fills scratch.scaled and scratch.weights for n keys; a token below the floor weighs nothing.
void weigh(const uint64_t* keys, int n, Scale scale, float floor, SampleScratch& scratch) {
    float* scaled = scratch.scaled.data();
    for (int i = 0; i < n; i++) scaled[i] = scale(logit_of(keys[i]));
    for (int i = 0; i < n; i += WIDTH) {
        const Floats s = i + WIDTH <= n ? lanes::load(scaled + i) : lanes::load_part(scaled + i, n - i, -INF);
        lanes::store(scratch.weights.data() + i, s >= lanes::splat(floor) ? lanes::exp_nonpositive(s) : Floats{});
    }
}

// The key of the token at which the running mass of the sorted keys reaches `need`.
uint64_t walk(const uint64_t* keys, int n, double need, const float* weights) {
    double running = 0;
    int last = 0;
    for (int i = 0; i < n && weights[i] > 0; i++) {
        last = i;
        if ((running += weights[i]) >= need) break;
    }
    return keys[last];
}

// The last token that top_p keeps of the whole row. Only tokens that could be within top_p are looked at one by one: all
// those that weigh less than the share of an even split of what top_p leaves out are left out together.
uint64_t nucleus_boundary(const float* x, int vocab, Scale scale, float floor, float top_p, SampleScratch& scratch) {
    const double total = mass(x, vocab, scale, floor);
    double need = top_p * total * (1 - TOP_P_SLACK);
    const float cut = std::max((float)std::log(0.5 * (total - need) / vocab), floor);
    uint64_t* keys = scratch.keys.data();
    int n = collect(x, vocab, scale, cut, keys);
    weigh(keys, n, scale, floor, scratch);
    if (n > BINS) {  // keep the one bin in which the mass reaches `need`
        double bins[BINS] = {};
        const float density = cut < 0 ? BINS / -cut : 0;
        auto bin = [&](int i) { return std::min((int)(-scratch.scaled[i] * density), BINS - 1); };
        for (int i = 0; i < n; i++) bins[bin(i)] += scratch.weights[i];
        int chosen = 0;
        double before = 0, reached = 0;
        for (int i = 0; i < BINS && reached < need; i++)
            if (bins[i] > 0) chosen = i, before = reached, reached += bins[i];
        need -= before;
        int kept = 0;
        for (int i = 0; i < n; i++)
            if (bin(i) == chosen) keys[kept++] = keys[i];
        n = kept;
    }
    std::sort(keys, keys + n, std::greater<uint64_t>());
    weigh(keys, n, scale, floor, scratch);
    return walk(keys, n, need, scratch.weights.data());
}

// --- the draw

// The token with the largest scaled logit + noise among those not below `floor` and not after `boundary`.
int32_t noisy_argmax(const float* x, int vocab, const Peak& peak, Scale scale, float floor, uint64_t boundary, const Noise& noise) {
    float best = Noise::gumbel(noise.bits(peak.id));  // the peak passes every filter; its scaled logit is 0
    int32_t winner = peak.id;
    const Floats least = lanes::splat(floor), edge = lanes::splat(boundary ? logit_of(boundary) : -INF);
    const int32_t edge_id = boundary ? id_of(boundary) : vocab;
    for (int first = 0; first < vocab; first += 2 * WIDTH) {
        Floats s[2];
        uint32_t able[2];
        for (int h = 0; h < 2; h++) {
            const int at = first + h * WIDTH;
            const Floats v = at + WIDTH <= vocab ? lanes::load(x + at) : at < vocab ? lanes::load_part(x + at, vocab - at, -INF) : lanes::splat(-INF);
            s[h] = scale(v);
            able[h] = lanes::at_least(s[h], lanes::larger(least, lanes::splat(best - LARGEST_NOISE))) & lanes::at_least(v, edge);
        }
        if (!(able[0] | able[1])) continue;
        lanes::Words bits[2];
        noise.bits(first, bits);
        for (int h = 0; h < 2; h++) {
            const Floats bound = s[h] + Noise::gumbel_bound(Noise::uniform(bits[h]));
            for (uint32_t rest = able[h] & lanes::at_least(bound, lanes::splat(best)); rest; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                const int32_t id = first + h * WIDTH + lane;
                if (id >= vocab || (x[id] == edge[0] && id > edge_id)) continue;
                const float score = s[h][lane] + Noise::gumbel(bits[h][lane]);
                if (score > best || (score == best && id < winner)) best = score, winner = id;
            }
        }
    }
    return winner;
}

int32_t draw(const float* x, int vocab, const Peak& peak, const SamplingView& b, int row, SampleScratch& scratch) {
    const float temperature = b.temperature[row], top_p = b.top_p[row], min_p = b.min_p[row];
    if (!(temperature > 0)) return peak.id;
    const Scale scale{peak.logit, std::min(1.0f / temperature, 3e38f)};  // finite, so that the peak's 0 stays 0
    const float floor = min_p > 0 ? (float)std::log((double)min_p) : -INF;
    const int k = b.top_k[row];
    uint64_t boundary = 0;
    if (k > 0 && k < vocab) {
        const bool nucleus = top_p < 1;
        const uint64_t* keys = first_tokens(x, vocab, k, nucleus, scratch);
        boundary = keys[k - 1];
        if (nucleus) {
            weigh(keys, k, scale, floor, scratch);
            double total = 0;
            for (int i = 0; i < k; i++) total += scratch.weights[i];
            boundary = walk(keys, k, top_p * total * (1 - TOP_P_SLACK), scratch.weights.data());
        }
    } else if (top_p < 1) {
        boundary = nucleus_boundary(x, vocab, scale, floor, top_p, scratch);
    }
    return noisy_argmax(x, vocab, peak, scale, floor, boundary, Noise(b.seed[row], b.position[row]));
}

// --- logprobs

// `wanted` alternatives and the logprob of `token`; an unusable row reports -inf and no alternatives.
void report(const float* x, int vocab, const Peak& peak, int32_t token, int wanted, int columns, float* logprob, int32_t* ids,
            float* values, SampleScratch& scratch) {
    *logprob = -INF;
    std::fill(ids, ids + columns, -1);
    std::fill(values, values + columns, -INF);
    if (wanted < 0 || !peak.usable) return;
    const double norm = peak.logit + std::log(mass(x, vocab, {peak.logit, 1.0f}, -INF));
    if (token >= 0 && token < vocab) *logprob = (float)(x[token] - norm);
    const int k = std::min(std::min(wanted, columns), vocab);
    if (k <= 0) return;
    const uint64_t* keys = first_tokens(x, vocab, k, true, scratch);
    for (int i = 0; i < k; i++) ids[i] = id_of(keys[i]), values[i] = (float)(logit_of(keys[i]) - norm);
}

}  // namespace

void SampleScratch::fit(int vocab) {
    const size_t padded = (size_t)vocab + lanes::WIDTH, groups = (size_t)(vocab + BLOCK - 1) / BLOCK * lanes::WIDTH;
    if (maxima.size() == groups && logits.size() == padded) return;
    maxima.resize(groups), sorted_maxima.resize(groups), keys.resize(padded);
    logits.resize(padded), scaled.resize(padded), weights.resize(padded);
}

void sample_row(const float* logits, int vocab, const SamplingView& b, int row, SampleScratch& scratch, const SampleOutput& out) {
    scratch.fit(vocab);
    const int32_t target = b.target[row];
    const float* x = target >= 0 ? logits : processed(logits, vocab, b, row, scratch);
    const Peak peak = find_peak(x, vocab, scratch);
    int32_t token = -1;
    if (peak.usable) token = target >= 0 ? target : draw(x, vocab, peak, b, row, scratch);
    out.tokens[row] = token;
    if (b.num_logprobs < 0) return;
    const size_t at = (size_t)row * b.num_logprobs;
    report(x, vocab, peak, token, b.row_logprobs ? b.row_logprobs[row] : b.num_logprobs, b.num_logprobs, out.logprobs + row,
           out.top_ids + at, out.top_logprobs + at, scratch);
}

}  // namespace octavo

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
