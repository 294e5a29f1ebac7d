// Jobs of products with factors of low rank: rows of any number of adapters in one call.
#pragma once

#include "kernels.h"

namespace low_rank {

// One adapter's rows, as Python passes them. All adapters of a call have factors of one shape.
struct Job {
    bf16* wide;  // [n, width], with a step from row to row
    i64 wide_step;
    bf16* narrow;  // [n, rank]
    i64 narrow_step;
    void* factor;  // bfloat16, or the float32 sums of its gradient
    i64 n;

    const bf16* matrix() const { return static_cast<const bf16*>(factor); }
    float* sums() const { return static_cast<float*>(factor); }
};
static_assert(sizeof(Job) == 6 * sizeof(i64), "as Python has them");

inline const Job* jobs_of(const i64* table) { return reinterpret_cast<const Job*>(table); }
inline const i64* table_of(const Job& job) { return reinterpret_cast<const i64*>(&job); }

// One thread's part of a number of things.
struct Part {
    i64 start, end;

    static Part all(i64 count) { return {0, count}; }

    // This thread's part.
    static Part own(i64 count) {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        return {count * thread / threads, count * (thread + 1) / threads};
    }
};

inline i64 strips_of(i64 n, i64 strip) { return (n + strip - 1) / strip; }

inline i64 count_strips(const Job* jobs, i64 num_jobs, i64 strip) {
    i64 count = 0;
    for (i64 i = 0; i < num_jobs; i++) count += strips_of(jobs[i].n, strip);
    return count;
}

// Divides the jobs' rows among threads, in whole strips. arrange(job, blocks, room) arranges that
// part of a job's factor, of `num_blocks`, as the kernel reads it; run(job, rows, room) multiplies
// some of its rows. With several jobs each thread arranges the factors that it needs; one job's
// factor is arranged by all threads together.
template <typename T, typename Arrange, typename Run>
void for_strips(const Job* jobs, i64 num_jobs, i64 strip, i64 num_blocks, i64 num_elements,
                i64 num_threads, Arrange arrange, Run run) {
    thread_local Scratch shared_scratch, own_scratch;
    auto room = [=](Scratch& scratch) {
        return reinterpret_cast<T*>(scratch.take(num_elements * sizeof(T)));
    };
    T* const shared = num_jobs == 1 ? room(shared_scratch) : nullptr;
    const i64 num_strips = count_strips(jobs, num_jobs, strip);
#pragma omp parallel num_threads(num_threads)
    {
        T* const own = shared ? shared : room(own_scratch);
        if (shared) {
            arrange(jobs[0], Part::own(num_blocks), own);
#pragma omp barrier
        }
        Part left = Part::own(num_strips);
        for (i64 i = 0; i < num_jobs && left.end > 0; i++) {
            const Job& job = jobs[i];
            const i64 count = strips_of(job.n, strip);
            const Part rows{std::max<i64>(left.start, 0) * strip,
                            std::min(job.n, left.end * strip)};
            if (rows.start < rows.end) {
                if (!shared) arrange(job, Part::all(num_blocks), own);
                run(job, rows, own);
            }
            left.start -= count, left.end -= count;
        }
    }
}

}  // namespace low_rank
