// A whole step of a Llama-shaped decoder on the CPU in one call: embed, layers, LM head, sample.
//
// Every thread of the pool walks the same list of operations; each operation is a loop shared by the threads with a
// barrier after it. The residual stream is float32. The C structures are mirrored in library.py.
#include <cerrno>
#include <unistd.h>
#include <algorithm>
#include "attention.h"
#include "pack.h"
#include "sampler.h"

namespace octavo {

struct Layer {
    Matrix qkv[3], output, gate_up[2], down;
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float *q_norm, *k_norm;            // [dim] or null
    void *keys, *values;
    int32_t window, group;
};

enum KVFormat : int32_t { KV_BF16 = 0, KV_F32 = 1, KV_INT8 = 2 };

struct Model {
    int32_t hidden, intermediate, layers, heads, kv_heads, dim, vocab, page_size, kv_format;  // kv_format: of KVFormat
    float eps;
    const float *cosine, *sine;  // [positions, dim / 2]
    const float* final_norm;
    Matrix embedding, head;
    Layer* layer;
};

struct Step {
    int32_t rows, sequences, logits, table_stride, groups;
    const int32_t *tokens, *positions, *query_starts, *lengths;
    const int32_t* const* tables;  // per layer group [sequences, table_stride]
    const int32_t* const* copies;  // per layer group [n, 2]
    const int32_t* copy_counts;
    const int32_t* logit_rows;
    const SamplingView* sampling;
    const SampleOutput* output;
    float* logits_out;  // [logits, vocab] when the caller wants them, else null
};

constexpr int LOGIT_SLICE = 64;  // logit rows in memory at a time

// Everything one step needs between its operations; grows to the largest step seen.
struct Workspace {
    std::vector<float> x, qkv, attended, gate_up, logits, f32, factor, finest, rest;
    std::vector<bf16> b16, inner;
    std::vector<int8_t> i8;
    std::vector<uint8_t> query;
    std::vector<int32_t> slot, sequence, shift, sums;
    AttentionPlan plan, last_plan;
    std::vector<int32_t> last_starts;
    std::vector<Scratch> own;
    std::vector<SampleScratch> sampler;
    Scratch shared;
    size_t widest = 0;  // numbers in the widest activation row

    void fit(const Model& m, const Step& s, int threads) {
        const size_t t = s.rows;
        widest = std::max(m.hidden, std::max(m.intermediate, m.heads * m.dim));
        const size_t l = s.logits < LOGIT_SLICE ? s.logits : LOGIT_SLICE;
        grow(x, t * m.hidden), grow(qkv, t * (m.heads + 2 * m.kv_heads) * m.dim), grow(attended, t * m.heads * m.dim);
        grow(gate_up, t * 2 * m.intermediate), grow(logits, l * m.vocab), grow(query, t * m.heads * m.dim * 4);
        grow(slot, t), grow(sequence, t), grow(own, (size_t)threads), grow(sampler, (size_t)threads);
        fit_rows(std::max(t, l)), grow(inner, (std::max(t, l) + BLOCK) * m.intermediate);
    }
    // Activation rows of the widest width, and those that a tile may read past the last.
    void fit_rows(size_t count) {
        const size_t rows = count + BLOCK, numbers = rows * widest, groups = rows * pairs_of(widest) * 2;
        grow(f32, numbers), grow(b16, numbers), grow(i8, numbers), grow(shift, groups), grow(factor, groups), grow(sums, groups), grow(finest, rows), grow(rest, rows);
    }
    template <class V>
    static void grow(V& v, size_t n) {
        if (v.size() < n) v.resize(n);
    }
    // Room for `count` rows of any width, for those from `first` (a multiple of eight, tiled of sixteen) on: no two panels share any of it.
    Rows rows(int first, int count, int width) {
        const size_t at = (size_t)first * widest, group = (size_t)first * pairs_of(widest) * 2;
        return {count, width, f32.data() + at, b16.data() + at, i8.data() + at, shift.data() + group, factor.data() + group, sums.data() + group, finest.data() + first, rest.data() + first};
    }
    // The gated MLP's middle: beside its own input where a matrix product writes it.
    Rows inner_rows(int first, int count, int width) {
        Rows r = rows(first, count, width);
        r.b16 = inner.data() + (size_t)first * width;
        return r;
    }
};

// A step to compute, and the eventfd that counts one up when it is done.
struct Errand {
    struct Engine* engine;
    const Model* model;
    const Step* step;
    int descriptor;
};

struct Engine {
    Pool pool;
    Workspace work;
    explicit Engine(int threads) : pool(threads) {}
    ~Engine() {
        if (!driven) return;
        errand = {};
        errands.ring();
        pthread_join(driver, nullptr);
    }

    // Have a step done by a thread that only waits for such errands, and go on. One at a time; one without a model ends it.
    void send(const Errand& step) {
        errand = step;
        errands.ring();
        if (!driven) driven = !pthread_create(&driver, nullptr, &Engine::drive, this);
        if (!driven) perform(errand);
    }
    static void* drive(void* engine) {
        Engine& e = *(Engine*)engine;
        for (uint32_t seen = 0;;) {
            seen = e.errands.wait(seen);
            if (!e.errand.model) return nullptr;
            perform(e.errand);
        }
    }
    static void perform(Errand errand);
    pthread_t driver;
    bool driven = false;
    Errand errand;
    Bell errands;

    // Run `job(thread)` on every thread, whatever others have done with their tiles since the last.
    template <class F>
    void run(const F& job) {
        pool.run([&](int thread) {
            amx::forget();
            job(thread);
        });
    }
};

// y = x / sqrt(mean(x^2) + eps) * weight, one row in the form the next matrix reads.
INLINE void norm_row(const float* x, const float* weight, float eps, const Rows& out, Form form, int r) {
    const int width = out.width;
    f32x16 squares = {};
    for (int i = 0; i < width; i += 16) squares = fma(load<f32x16>(x + i), load<f32x16>(x + i), squares);
    const f32x16 inverse = splat(1.0f / std::sqrt(sum(squares) / (float)width + eps));
    write_row(out, form, r, [&](int i) { return load<f32x16>(x + 16 * i) * inverse * load<f32x16>(weight + 16 * i); });
}

// One head of q or k: optional RMSNorm, then rotation of (x[i], x[i + dim / 2]) by the angle of the position.
INLINE void rotate_head(const float* in, const float* norm, float eps, const float* cosine, const float* sine, int dim, float* out) {
    float inverse = 1;
    if (norm) {
        float squares = 0;
        for (int i = 0; i < dim; i++) squares += in[i] * in[i];
        inverse = 1.0f / std::sqrt(squares / (float)dim + eps);
    }
    auto rotate = [&]<class V>(int i) {
        const int half = dim / 2;
        V a = load<V>(in + i), b = load<V>(in + half + i);
        const V c = load<V>(cosine + i), s = load<V>(sine + i);
        if (norm) a = a * inverse * load<V>(norm + i), b = b * inverse * load<V>(norm + half + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    };
    int i = 0;
    for (; i + 16 <= dim / 2; i += 16) rotate.template operator()<f32x16>(i);
    for (; i < dim / 2; i++) rotate.template operator()<float>(i);
}

template <class E>
KV<E> kv_of(const Model& m, const Layer& layer) {
    return {(E*)layer.keys, (E*)layer.values, m.heads, m.kv_heads, m.dim, m.page_size, layer.window};
}

template <class E>
void place_row(const Model& m, const Layer& layer, const KV<E>& kv, Workspace& w, const Step& s, int r) {
    const int q = m.heads * m.dim, width = q + 2 * m.kv_heads * m.dim;
    const size_t size = query_size<E>(m.dim);
    const float* row = w.qkv.data() + (size_t)r * width;
    const float *cosine = m.cosine + (size_t)s.positions[r] * (m.dim / 2), *sine = m.sine + (size_t)s.positions[r] * (m.dim / 2);
    float head[MAX_DIM];
    E* query = (E*)w.query.data() + (size_t)r * m.heads * size;
    for (int h = 0; h < m.heads; h++) {
        rotate_head(row + h * m.dim, layer.q_norm, m.eps, cosine, sine, m.dim, head);
        write_query(head, m.dim, query + h * size);
    }
    const int32_t page = s.tables[layer.group][(size_t)w.sequence[r] * s.table_stride + w.slot[r] / m.page_size];
    for (int h = 0; h < m.kv_heads; h++) {
        rotate_head(row + q + h * m.dim, layer.k_norm, m.eps, cosine, sine, m.dim, head);
        write_kv(kv, page, h, w.slot[r] % m.page_size, head, row + q + (m.kv_heads + h) * m.dim);
    }
}

// A layer up to its keys and values, for rows [first, first + count): norm, q k v, rotation. `first`: see `Workspace::rows`.
template <class E>
void before_attention(const Team& team, Workspace& w, const Model& m, const Layer& layer, const KV<E>& kv, const Step& s, int first, int count) {
    const int width = (m.heads + 2 * m.kv_heads) * m.dim, grain = rows_a_task(count);
    const Rows hidden = w.rows(first, count, m.hidden);
    team.loop(count, grain, [&](int r) {
        norm_row(w.x.data() + (size_t)(first + r) * m.hidden, layer.attention_norm, m.eps, hidden, form_of(layer.qkv, 3), r);
    });
    linear(team, layer.qkv, 3, hidden, {w.qkv.data() + (size_t)first * width, (size_t)width, false});
    team.loop(count, grain, [&](int r) { place_row(m, layer, kv, w, s, first + r); });
}

// And from the attended rows to the end: output projection, norm, gated MLP.
void after_attention(const Team& team, Workspace& w, const Model& m, const Layer& layer, const Step& s, int first, int count) {
    const int q = m.heads * m.dim, grain = rows_a_task(count);
    const Rows heads = w.rows(first, count, q), hidden = w.rows(first, count, m.hidden);
    const Rows inner = w.inner_rows(first, count, m.intermediate);
    float* x = w.x.data() + (size_t)first * m.hidden;
    team.loop(count, grain, [&](int r) {
        const float* row = w.attended.data() + (size_t)(first + r) * q;
        write_row(heads, form_of(layer.output.format), r, [&](int i) { return load<f32x16>(row + 16 * i); });
    });
    linear(team, &layer.output, 1, heads, {x, (size_t)m.hidden, true});
    team.loop(count, grain, [&](int r) { norm_row(x + (size_t)r * m.hidden, layer.mlp_norm, m.eps, hidden, form_of(layer.gate_up, 2), r); });
    if (fuses(layer.gate_up)) {
        gated_linear(team, layer.gate_up, hidden, inner);
    } else {
        float* products = w.gate_up.data() + (size_t)first * 2 * m.intermediate;
        linear(team, layer.gate_up, 2, hidden, {products, (size_t)2 * m.intermediate, false});
        team.loop(count, grain, [&](int r) {
            const float *gate = products + (size_t)r * 2 * m.intermediate, *up = gate + m.intermediate;
            write_row(inner, form_of(layer.down.format), r, [&](int i) { return silu(load<f32x16>(gate + 16 * i)) * load<f32x16>(up + 16 * i); });
        });
    }
    linear(team, &layer.down, 1, inner, {x, (size_t)m.hidden, true});
}

// The residual and the query of the rows with logits, to the front: in order, none is overwritten before it is read.
template <class E>
void gather_rows(Workspace& w, const Model& m, const Step& s) {
    const size_t query = m.heads * query_size<E>(m.dim);
    for (int i = 0; i < s.logits; i++) {
        std::memmove(w.x.data() + (size_t)i * m.hidden, w.x.data() + (size_t)s.logit_rows[i] * m.hidden, m.hidden * sizeof(float));
        std::memmove((E*)w.query.data() + i * query, (E*)w.query.data() + s.logit_rows[i] * query, query * sizeof(E));
    }
}

// Few rows: the threads share every matrix by its outputs. Many rows: each thread takes panels of rows through the layer, so
// that what a row leaves behind stays in its core's cache; but then every thread reads all the weights.
constexpr int PANEL = 128;
constexpr int FEW_OVER = 4;  // rows over whole eights that the last panel takes besides; more of them cost as much as eight

// Of the last layer only the rows whose logits are wanted need more than their keys and values.
template <class E>
void run_layer(Engine& e, const Model& m, const Layer& layer, const Step& s, bool last, int thread) {
    Workspace& w = e.work;
    const bool fewer = last && !w.last_starts.empty();
    const KV<E> kv = kv_of<E>(m, layer);
    const AttentionStep<E> step{fewer ? w.last_starts.data() : s.query_starts, s.lengths, s.tables[layer.group], s.sequences, s.table_stride,
                                (E*)w.query.data(), w.attended.data()};
    const Team all{&e.pool}, alone{nullptr};
    auto panels = [&](int rows, const auto& part) {
        const int threads = e.pool.threads();
        if (rows < (layer.down.format == W4 ? 4 : 8) * threads * threads) return part(all, 0, rows);
        // As many for each thread, of as many eights of rows as the others or one more; the last has the rest.
        const int count = (rows + threads * PANEL - 1) / (threads * PANEL) * threads, unit = amx::available() ? BLOCK : ROWS;
        const int units = (rows + unit - 1 - FEW_OVER) / unit, each = units / count, more = units % count;
        if (!each) return part(all, 0, rows);
        e.pool.loop(count, 1, [&](int p) {
            const int first = (p * each + std::min(p, more)) * unit;
            part(alone, first, p == count - 1 ? rows - first : (each + (p < more)) * unit);
        });
    };
    panels(s.rows, [&](const Team& team, int first, int count) { before_attention<E>(team, w, m, layer, kv, s, first, count); });
    if (fewer) e.pool.loop(1, 1, [&](int) { gather_rows<E>(w, m, s); });
    attention(e.pool, kv, step, fewer ? w.last_plan : w.plan, w.shared, w.own, thread);
    panels(fewer ? s.logits : s.rows, [&](const Team& team, int first, int count) { after_attention(team, w, m, layer, s, first, count); });
}

// Norm and LM head for the rows that need logits, a slice at a time; each slice is sampled before the next is computed.
void finish_rows(Engine& e, const Model& m, const Step& s, int thread) {
    Workspace& w = e.work;
    for (int first = 0; first < s.logits; first += LOGIT_SLICE) {
        const int count = s.logits - first < LOGIT_SLICE ? s.logits - first : LOGIT_SLICE;
        const Rows rows = w.rows(0, count, m.hidden);
        e.pool.loop(count, rows_a_task(count), [&](int i) {
            norm_row(w.x.data() + (size_t)(w.last_starts.empty() ? s.logit_rows[first + i] : first + i) * m.hidden, m.final_norm, m.eps, rows, form_of(m.head.format), i);
        });
        float* logits = s.logits_out ? s.logits_out + (size_t)first * m.vocab : w.logits.data();
        linear(Team{&e.pool}, &m.head, 1, rows, {logits, (size_t)m.vocab, false});
        if (s.sampling)
            e.pool.loop(count, 1, [&](int i) { sample_row(logits + (size_t)i * m.vocab, m.vocab, *s.sampling, first + i, w.sampler[thread], *s.output); });
    }
}

// Where each sequence's rows with logits start among all such. None when every row has logits, or they are not each
// sequence's last ones, once each: then the last layer is like the others.
void plan_last(Workspace& w, const Step& s) {
    w.last_starts.assign(1, 0);
    int next = 0;
    for (int q = 0; q < s.sequences; q++) {
        const int end = s.query_starts[q + 1];
        const int first = next;
        while (next < s.logits && s.logit_rows[next] < end) next++;
        for (int i = first; i < next; i++)
            if (s.logit_rows[i] != end - next + i) return w.last_starts.clear();
        w.last_starts.push_back(next);
    }
    if (next != s.logits || next == s.rows) w.last_starts.clear();
}

// Where each row of a step is written, and the units of its attention.
void plan_rows(Engine& e, const Model& m, const Step& s) {
    Workspace& w = e.work;
    for (int q = 0; q < s.sequences; q++)
        for (int r = s.query_starts[q]; r < s.query_starts[q + 1]; r++) {
            w.sequence[r] = q;
            w.slot[r] = s.lengths[q] - s.query_starts[q + 1] + r;
        }
    const PageTables tables{s.tables, s.groups, s.table_stride, m.page_size};
    auto plan = [&](AttentionPlan& attention, const int32_t* query_starts) {
        attention.make(query_starts, s.lengths, s.sequences, tables, m.heads / m.kv_heads, m.kv_heads, e.pool.threads(), [&](int rows) { return partial_floats(rows, m.dim); });
        Workspace::grow(w.shared.memory, attention.scratch);
    };
    plan(w.plan, s.query_starts);
    plan_last(w, s);
    if (!w.last_starts.empty()) plan(w.last_plan, w.last_starts.data());
}

template <class E>
void copy_pages(const KV<E>& kv, const Layer& layer, const Step& s) {
    const size_t page = kv.page_bytes() / sizeof(E);
    for (int c = 0; c < s.copy_counts[layer.group]; c++) {
        const int32_t from = s.copies[layer.group][2 * c], to = s.copies[layer.group][2 * c + 1];
        std::memcpy(kv.keys + to * page, kv.keys + from * page, page * sizeof(E));
        std::memcpy(kv.values + to * page, kv.values + from * page, page * sizeof(E));
    }
}

template <class E>
void attend_rows_only(Engine& e, const Model& m, const Layer& layer, const Step& s, const float* rows, float* out) {
    Workspace& w = e.work;
    w.fit(m, s, e.pool.threads());
    plan_rows(e, m, s);
    const int q = m.heads * m.dim, width = q + 2 * m.kv_heads * m.dim;
    const KV<E> kv = kv_of<E>(m, layer);
    copy_pages(kv, layer, s);
    e.run([&](int thread) {
        e.pool.loop(s.rows, 4, [&](int r) {
            const float* row = rows + (size_t)r * width;
            float head[MAX_DIM];
            for (int h = 0; h < m.heads; h++) {
                std::memcpy(head, row + h * m.dim, m.dim * sizeof(float));
                write_query(head, m.dim, (E*)w.query.data() + ((size_t)r * m.heads + h) * query_size<E>(m.dim));
            }
            const int32_t page = s.tables[layer.group][(size_t)w.sequence[r] * s.table_stride + w.slot[r] / m.page_size];
            for (int h = 0; h < m.kv_heads; h++) {
                std::memcpy(head, row + q + h * m.dim, m.dim * sizeof(float));
                write_kv(kv, page, h, w.slot[r] % m.page_size, head, row + q + (m.kv_heads + h) * m.dim);
            }
        });
        attention(e.pool, kv, AttentionStep<E>{s.query_starts, s.lengths, s.tables[layer.group], s.sequences, s.table_stride, (E*)w.query.data(), out},
                  w.plan, w.shared, w.own, thread);
    });
}

template <class E>
void run_step(Engine& e, const Model& m, const Step& s) {
    Workspace& w = e.work;
    w.fit(m, s, e.pool.threads());
    plan_rows(e, m, s);
    e.run([&](int thread) {
        e.pool.loop(m.layers, 1, [&](int l) { copy_pages(kv_of<E>(m, m.layer[l]), m.layer[l], s); });
        e.pool.loop(s.rows, 4, [&](int r) { unpack_row(m.embedding, s.tokens[r], w.x.data() + (size_t)r * m.hidden); });
        for (int l = 0; l < m.layers; l++) run_layer<E>(e, m, m.layer[l], s, l == m.layers - 1, thread);
        finish_rows(e, m, s, thread);
    });
}

void run_step(Engine& e, const Model& m, const Step& s) {
    switch (m.kv_format) {
        case KV_F32: return run_step<float>(e, m, s);
        case KV_INT8: return run_step<int8_t>(e, m, s);
        default: return run_step<bf16>(e, m, s);
    }
}

void Engine::perform(Errand errand) {
    run_step(*errand.engine, *errand.model, *errand.step);
    const uint64_t one = 1;
    while (write(errand.descriptor, &one, sizeof one) < 0 && errno == EINTR) {}
}

}  // namespace octavo

using namespace octavo;

extern "C" {

void* octavo_engine(int threads) { return new Engine(threads); }
void octavo_tiles(int allowed) { amx::allow(allowed); }
int octavo_has_tiles() { return amx::available(); }
void octavo_engine_free(void* e) { delete (Engine*)e; }

void octavo_step(void* engine, const Model* model, const Step* step) { run_step(*(Engine*)engine, *model, *step); }

// The same without waiting for it: `descriptor`, an eventfd, counts one up when it is done.
void octavo_start(void* engine, const Model* model, const Step* step, int descriptor) { ((Engine*)engine)->send({(Engine*)engine, model, step, descriptor}); }

size_t octavo_packed_bytes(int format, int outs, int ins) { return (size_t)((outs + BLOCK - 1) / BLOCK) * block_bytes(format, ins); }

// Stored rows [outs, row_bytes] of `kind` to packed blocks at `out`.
void octavo_pack(void* engine, int kind, const uint8_t* data, size_t row_bytes, int outs, int ins, int format, uint8_t* out) {
    Pool& pool = ((Engine*)engine)->pool;
    pool.run([&](int) {
        pool.loop((outs + BLOCK - 1) / BLOCK, 4, [&](int block) {
            const uint8_t* rows[BLOCK];
            for (int i = 0; i < BLOCK; i++) rows[i] = block * BLOCK + i < outs ? data + (size_t)(block * BLOCK + i) * row_bytes : nullptr;
            pack_block(kind, rows, format, ins, out + block * block_bytes(format, ins));
        });
    });
}

// One layer's attention alone, for the decoder in torch operators: rows are float [rows, (heads + 2 kv_heads) * dim] after
// RoPE, keys and values are written to the pages first. out [rows, heads * dim].
void octavo_attend(void* engine, const Model* model, const Layer* layer, const Step* step, const float* rows, float* out) {
    Engine& e = *(Engine*)engine;
    switch (model->kv_format) {
        case KV_F32: return attend_rows_only<float>(e, *model, *layer, *step, rows, out);
        case KV_INT8: return attend_rows_only<int8_t>(e, *model, *layer, *step, rows, out);
        default: return attend_rows_only<bf16>(e, *model, *layer, *step, rows, out);
    }
}

// x [rows, ins] float times one packed matrix, for tests and for measuring.
void octavo_linear(void* engine, const Matrix* w, const float* x, int rows, float* out) {
    Engine& e = *(Engine*)engine;
    e.work.widest = w->ins;
    e.work.fit_rows(rows);
    const Rows form = e.work.rows(0, rows, w->ins);
    e.run([&](int) {
        e.pool.loop(rows, rows_a_task(rows), [&](int r) { write_row(form, form_of(w->format), r, [&](int i) { return load<f32x16>(x + (size_t)r * w->ins + 16 * i); }); });
        linear(Team{&e.pool}, w, 1, form, {out, (size_t)w->outs, false});
    });
}

}
