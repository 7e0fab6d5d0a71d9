// What there is to do in a step's attention: units of work, the same for every layer.
//
// Few rows over long contexts are cut by split, so that one long sequence keeps all threads busy; the fold afterwards gives
// the same bits as the uncut walk. Sequences whose pages of a split are the same attend to it together (Juravsky et al.,
// Hydragen, 2024): its keys and values are read once for all of them, and their rows fill the register tiles.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace octavo {

constexpr int SPLIT = 512;     // keys between two folds
constexpr int MAX_ROWS = 64;   // query rows of a unit: of every head that shares the keys; no model may have more heads that do
constexpr int MOST_CUT = 2 * MAX_ROWS;   // query rows of a sequence that is cut by split: more are work enough for all threads
constexpr int MOST_MATE = MAX_ROWS / 4;  // and of one that attends together with others: more fill the register tiles alone

// What one thread does at a time. Of one sequence: rows [first, first + count). Of several: all their rows, `count` together.
struct Unit {
    int mate, mates;  // the sequences are mates[mate], mates[mate + 1], ...
    int kv_head, first, count;
    int split, splits;  // splits 0: all splits, nothing is left to fold; 1: `split` alone; in a fold, how many are joined
    size_t at;          // with splits 1 where its partials lie, in floats; in a fold its first part
};

// Where a unit leaves a sequence's partials: from row `row` on in those of `rows` rows that lie at `at`. 0 rows: no unit yet.
struct Part {
    size_t at;
    int rows, row;
};

// One plan serves all layers, so pages are the same only if they are in every layer group.
struct PageTables {
    const int32_t* const* of;  // of[g]: those of layer group g, [sequences, stride]
    int groups, stride, page_size;
    // Whether two sequences have the same pages in a split.
    bool same(int a, int b, int split) const {
        const size_t pages = SPLIT / page_size, from = split * pages;
        for (int g = 0; g < groups; g++)
            if (std::memcmp(of[g] + (size_t)a * stride + from, of[g] + (size_t)b * stride + from, pages * sizeof(int32_t))) return false;
        return true;
    }
    // What orders sequences so that those come together, if not quite always where there are several groups.
    int32_t last(int sequence, int split) const { return of[0][(size_t)sequence * stride + (split + 1) * (SPLIT / page_size) - 1]; }
};

struct AttentionPlan {
    std::vector<Unit> units, folds;
    std::vector<int> mates;  // first every sequence, as its own mate
    std::vector<Part> parts;
    size_t scratch;  // floats of all partials

    // `beside(rows)` floats are the partials of so many query rows; `shared` query heads share a kv head.
    template <class F>
    void make(const int32_t* query_starts, const int32_t* lengths, int sequences, const PageTables& tables, int shared, int kv_heads, int threads, const F& beside) {
        units.clear(), folds.clear(), parts.clear(), mates.resize(sequences), start.assign(sequences, -1), scratch = 0;
        const int tile = std::max(1, MAX_ROWS / shared);
        auto rows = [&](int s) { return query_starts[s + 1] - query_starts[s]; };
        auto splits = [&](int s) { return (lengths[s] + SPLIT - 1) / SPLIT; };
        auto tiles = [&](int s) { return (rows(s) + tile - 1) / tile; };
        auto part = [&](int s, int kv_head, int t, int split) { return start[s] + (kv_head * tiles(s) + t) * splits(s) + split; };
        int cut = 0;
        for (int s = 0; s < sequences; s++) {
            mates[s] = s;
            if (splits(s) < 2 || !rows(s) || rows(s) * shared > MOST_CUT) continue;
            start[s] = cut;
            cut += kv_heads * tiles(s) * splits(s);
        }
        parts.resize(cut, {0, 0, 0});
        auto place = [&](int mate, int together, int kv_head, int first, int count, int split) {
            units.push_back({mate, together, kv_head, first, count, split, 1, scratch});
            scratch += beside(count * shared);
        };
        // Enough units must be left for all threads.
        const int most = SPLIT % tables.page_size ? 1 : std::min(tile, cut / (2 * threads));
        for (int split = 0; most > 1; split++) {
            alike.clear();
            for (int s = 0; s < sequences; s++)
                // All its rows see all of the split, and its page table reaches so far.
                if (start[s] >= 0 && rows(s) * shared <= MOST_MATE && lengths[s] - rows(s) >= (split + 1) * SPLIT) alike.push_back({tables.last(s, split), s});
            if (alike.size() < 2) break;  // nor are there more in later splits
            std::sort(alike.begin(), alike.end());
            for (size_t i = 0, next; i < alike.size(); i = next) {
                int together = rows(alike[i].second);
                for (next = i + 1; next < alike.size() && (int)(next - i) < most; next++) {
                    const int s = alike[next].second;
                    if (together + rows(s) > tile || !tables.same(alike[i].second, s, split)) break;
                    together += rows(s);
                }
                if (next - i < 2) continue;
                const int mate = (int)mates.size();
                for (size_t j = i; j < next; j++) mates.push_back(alike[j].second);
                for (int h = 0; h < kv_heads; h++) {
                    int row = 0;
                    for (size_t j = i; j < next; j++) {
                        const int s = alike[j].second;
                        parts[part(s, h, 0, split)] = {scratch, together * shared, row * shared};
                        row += rows(s);
                    }
                    place(mate, (int)(next - i), h, 0, together, split);
                }
            }
        }
        for (int s = 0; s < sequences; s++)
            for (int h = 0; h < kv_heads; h++)
                for (int t = 0; t < tiles(s); t++) {
                    const int first = t * tile, count = std::min(tile, rows(s) - first);
                    if (start[s] < 0) {
                        units.push_back({s, 1, h, first, count, 0, 0, 0});
                        continue;
                    }
                    const int at = part(s, h, t, 0);
                    folds.push_back({s, 1, h, first, count, 0, splits(s), (size_t)at});
                    for (int i = 0; i < splits(s); i++)
                        if (!parts[at + i].rows) {
                            parts[at + i] = {scratch, count * shared, 0};
                            place(s, 1, h, first, count, i);
                        }
                }
    }

private:
    std::vector<int> start;  // of a sequence that is cut, its first part; else -1
    std::vector<std::pair<int32_t, int>> alike;
};

}  // namespace octavo
