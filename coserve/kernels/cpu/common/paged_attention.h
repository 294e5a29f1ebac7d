// Attention of rows that are each the last of a sequence of its own, with keys and values in pages,
// where they are read. The time of such a step is that of reading those once, so the query heads of
// a key head are processed together.
//
// A row's keys are cut into chunks. A chunk with some key heads is a unit of work, and the results
// of chunks are merged in their order, so that a result depends neither on the other rows nor on
// the division among threads.
#pragma once

#include "kernels.h"

#include <cmath>
#include <vector>

namespace {

const int CHUNK = 128;  // keys
// Bytes of keys and values that one thread reads before another would have woken.
const i64 BYTES_PER_THREAD = 64 << 10;

template <typename T>
struct PagedRows {
    const T *q, *keys, *values;
    const i64 *pages, *first_page, *lengths;
    T* out;
    float* lse;
    i64 num_rows, num_heads, num_key_heads, width, block_tokens, page_step, window;
    float scale;

    i64 group() const { return num_heads / num_key_heads; }
    i64 row_width() const { return num_key_heads * width; }
    i64 first_key(i64 row) const { return window ? std::max<i64>(0, lengths[row] - window) : 0; }
};

// Some keys of a row, of which it does not see the first few.
struct Chunk {
    i64 row, first_key;
    int num_keys, num_unseen;
};

// Results of chunks, by chunk and query head: the weighted sum of the values, the largest score,
// the sum of the weights.
struct Partial {
    float *values, *largest, *weights;
};

thread_local Scratch shared_scratch;

// Merges the chunks of a row, in their order, to its output for one query head.
template <typename T>
void merge(const PagedRows<T>& p, i64 row, i64 head, i64 first_chunk, i64 end_chunk,
           const Partial& all) {
    if (first_chunk == end_chunk) return;
    float largest = -INFINITY, weights = 0;
    for (i64 c = first_chunk; c < end_chunk; c++)
        largest = std::max(largest, all.largest[c * p.num_heads + head]);
    for (i64 c = first_chunk; c < end_chunk; c++) {
        const i64 at = c * p.num_heads + head;
        all.largest[at] = std::exp2(all.largest[at] - largest);
        weights += all.weights[at] * all.largest[at];
    }
    const i64 at = row * p.num_heads + head, VECTOR = 16;
    p.lse[at] = (largest + std::log2(weights)) * LN_2;
    for (i64 first = 0; first < p.width; first += VECTOR) {
        float sums[VECTOR] = {};
        for (i64 c = first_chunk; c < end_chunk; c++) {
            const float* values = all.values + (c * p.num_heads + head) * p.width + first;
            for (i64 i = 0; i < VECTOR; i++)
                sums[i] += values[i] * all.largest[c * p.num_heads + head];
        }
        for (i64 i = 0; i < VECTOR; i++) narrow(sums[i] / weights, p.out[at * p.width + first + i]);
    }
}

// Attends by workers, one for each thread. A Worker<T> has ALIGNED, the number of keys of which
// chunks begin at a multiple; heads_at_once(problem), the key heads of a unit; and attend(chunk,
// next, first_head, end_head, partial), which attends with these key heads, where `next` is the
// chunk after this one, or null.
template <typename Worker, typename T>
void attend_by(const PagedRows<T>& p, i64 num_threads) {
    std::vector<Chunk> chunks;
    std::vector<i64> first_chunk, keys_before;
    i64 num_keys = 0;
    for (i64 row = 0; row < p.num_rows; row++) {
        first_chunk.push_back(chunks.size());
        const i64 seen = p.first_key(row), first = seen / Worker::ALIGNED * Worker::ALIGNED;
        for (i64 key = first; key < p.lengths[row]; key += CHUNK) {
            const int count = int(std::min<i64>(CHUNK, p.lengths[row] - key));
            chunks.push_back({row, key, count, int(std::max<i64>(0, seen - key))});
            keys_before.push_back(num_keys);
            num_keys += count;
        }
    }
    first_chunk.push_back(chunks.size());
    const i64 per_chunk = p.num_heads, num_partials = chunks.size() * per_chunk;
    float* start =
        reinterpret_cast<float*>(shared_scratch.take(num_partials * (p.width + 2) * sizeof(float)));
    const Partial all{start, start + num_partials * p.width, start + num_partials * (p.width + 1)};

    const i64 num_bytes = num_keys * p.row_width() * 2 * sizeof(T);
    const int threads = int(std::max<i64>(1, std::min(num_threads, num_bytes / BYTES_PER_THREAD)));
    // Each thread has a run of the units, of as many keys as the others'.
    const i64 at_once = Worker::heads_at_once(p), units = (p.num_key_heads + at_once - 1) / at_once;
    const i64 work = num_keys * units, count = chunks.size();
    auto part = [&](int thread) {
        Worker worker(p);
        // A unit belongs to the thread in whose share of the work it begins.
        auto share = [&](i64 before) { return before * threads / work; };
        for (i64 c = 0; c < count; c++) {
            const i64 before = keys_before[c] * units, size = chunks[c].num_keys;
            if (share(before + (units - 1) * size) < thread || share(before) > thread) continue;
            i64 first = 0, end = units;
            while (share(before + first * size) < thread) first++;
            while (share(before + (end - 1) * size) > thread) end--;
            const i64 at = c * per_chunk;
            const bool is_continued =
                c + 1 < count && share((keys_before[c] + size) * units) == thread;
            worker.attend(chunks[c], is_continued ? &chunks[c + 1] : nullptr, first * at_once,
                          std::min(end * at_once, p.num_key_heads),
                          {all.values + at * p.width, all.largest + at, all.weights + at});
        }
    };
    auto finish = [&](int thread) {
        const i64 heads = p.num_rows * p.num_heads;
        for (i64 i = heads * thread / threads; i < heads * (thread + 1) / threads; i++) {
            const i64 row = i / p.num_heads;
            merge(p, row, i % p.num_heads, first_chunk[row], first_chunk[row + 1], all);
        }
    };
    if (threads == 1) {
        part(0), finish(0);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int thread = 0; thread < threads; thread++) part(thread);
#pragma omp for
        for (int thread = 0; thread < threads; thread++) finish(thread);
    }
}

}  // namespace
