// Collectives of ranks that are processes of one machine, over memory that they share (an arena).
//
// Ranks meet in epochs: each writes its part into a buffer of its own, publishes the epoch, and
// waits until all others have. A rank uses its two buffers in turn. Before it writes one again,
// every rank has published the epoch after that buffer's, so every rank has read it.
// `kernels/groups/_arena.py` states the same layout of the arena.

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "kernels.h"

namespace {

const i64 PAGE = 4096, LINE = 64;
const i64 MAX_RANKS = 64;
// Minimum number of bytes of sums that are computed in two phases: each rank adds one slice, and
// all ranks copy the others'.
const i64 MAX_BYTES_AT_ONCE = 64 << 10;
// How long a rank spins, and then yields its core again and again, before it sleeps. Sleeping costs
// some 50 us, and ranks of one step arrive tens of microseconds after each other.
const i64 SPIN_NS = 5'000, YIELD_NS = 1'000'000;
// How long a rank sleeps before it checks whether the others are still there.
const i64 SLEEP_NS = 10'000'000;

enum Outcome : i64 { COMPLETE, FAILED, GONE, LATE, DIFFERENT };

// A process whose end ends the waits for it. pidfd: -1 where there is none.
struct Process {
    i64 pid, pidfd;
};

// A rank's own state, as Python creates it (`ArenaRankState` in `_arena.py`).
struct Rank {
    char* arena;
    i64 rank, size, buffer_bytes;
    i64 epoch;       // next to be published
    i64 generation;  // failures of an earlier one do not count
    i64 outcome;     // not COMPLETE: every collective returns at once, until Python has raised the
                     // error
    i64 detail;  // the rank that is GONE, LATE or at a DIFFERENT collective; GONE: or `size`, for
                 // the parent
    i64 timeout_ns;
    const Process* processes;  // of the ranks, and of the parent
};

// First page of the arena.
struct Header {
    i64 constants[8];
    i64 failed;  // generation * 2^16 + the rank that failed
    i64 ended;   // not 0: the group is over
};

// A page for each rank, written by that rank alone but for `num_sleepers`.
struct RankPage {
    uint32_t epoch;
    uint32_t num_sleepers;
    i64 words[2];  // which collective this is, by epoch
    i64 numbers[2];
    i64 waited_ns;  // for others, all in all
};

Header& header(const Rank& g) { return *reinterpret_cast<Header*>(g.arena); }
RankPage& page(const Rank& g, i64 rank) {
    return *reinterpret_cast<RankPage*>(g.arena + PAGE * (1 + rank));
}

char* buffer(const Rank& g, i64 rank, i64 epoch) {
    return g.arena + PAGE * (1 + g.size) + (rank * 2 + (epoch & 1)) * g.buffer_bytes;
}

i64 now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return i64(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool has_failed(const Rank& g) {
    const Header& h = header(g);
    return __atomic_load_n(&h.failed, __ATOMIC_ACQUIRE) >> 16 >= g.generation ||
           __atomic_load_n(&h.ended, __ATOMIC_ACQUIRE);
}

bool end(Rank& g, Outcome outcome, i64 detail = 0) {
    g.outcome = outcome, g.detail = detail;
    return false;
}

bool is_gone(const Process& each) {
    if (each.pidfd < 0) return kill(pid_t(each.pid), 0) == -1 && errno == ESRCH;
    pollfd polled = {int(each.pidfd), POLLIN, 0};
    return poll(&polled, 1, 0) == 1;
}

// Epochs are counted in 32 bits, and may begin again at 0.
bool has_reached(uint32_t epoch, i64 target) { return int32_t(epoch - uint32_t(target)) >= 0; }

void sleep_until_published(RankPage& other, i64 epoch) {
    __atomic_fetch_add(&other.num_sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = __atomic_load_n(&other.epoch, __ATOMIC_SEQ_CST);
    const timespec limit = {0, SLEEP_NS};
    if (!has_reached(seen, epoch))
        syscall(SYS_futex, &other.epoch, FUTEX_WAIT, seen, &limit, nullptr, 0);
    __atomic_fetch_sub(&other.num_sleepers, 1, __ATOMIC_SEQ_CST);
}

bool wait_for(Rank& g, i64 rank, i64 epoch) {
    RankPage& other = page(g, rank);
    auto is_there = [&] {
        return has_reached(__atomic_load_n(&other.epoch, __ATOMIC_ACQUIRE), epoch);
    };
    if (is_there()) return true;
    const i64 start = now_ns();
    i64 waited = 0;
    for (; !is_there(); waited = now_ns() - start) {
        if (has_failed(g)) return end(g, FAILED);
        if (waited < SPIN_NS) {
            pause_core();
        } else if (waited < YIELD_NS) {
            sched_yield();
        } else {
            // A rank that has published may have ended since.
            if (is_gone(g.processes[rank])) return is_there() || end(g, GONE, rank);
            if (is_gone(g.processes[g.size])) return end(g, GONE, g.size);
            if (waited > g.timeout_ns) return end(g, LATE, rank);
            sleep_until_published(other, epoch);
        }
    }
    i64& all = page(g, g.rank).waited_ns;  // no other thread writes it
    __atomic_store_n(&all, all + waited, __ATOMIC_RELAXED);
    return true;
}

// Publishes what this rank has written, waits for all others, and checks that they are at the same
// collective.
bool meet(Rank& g, i64 word) {
    const i64 slot = g.epoch & 1;
    RankPage& own = page(g, g.rank);
    own.words[slot] = word;
    g.epoch++;
    __atomic_store_n(&own.epoch, uint32_t(g.epoch), __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own.num_sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own.epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    for (i64 r = 0; r < g.size; r++)
        if (r != g.rank && !wait_for(g, r, g.epoch)) return false;
    for (i64 r = 0; r < g.size; r++)
        if (page(g, r).words[slot] != word) return end(g, DIFFERENT, r);
    return true;
}

bool begin(Rank& g) { return !g.outcome && (!has_failed(g) || end(g, FAILED)); }

// Returns a number for the collective, by which ranks at different ones notice that.
enum Kind : i64 { SUM, GATHER, AGREE };
i64 word_of(Kind kind, i64 type, i64 num_bytes, i64 digest) {
    return digest << 32 ^ num_bytes << 6 ^ type << 3 ^ kind;
}

// Adds in the order of the ranks, in float32, rounded once. `out` may be one of the parts.
template <typename T>
void add_parts(const T* const* parts, i64 size, T* out, i64 n) {
    if (size == 2) {
        const T *a = parts[0], *b = parts[1];
#pragma omp simd
        for (i64 i = 0; i < n; i++) narrow(widen(a[i]) + widen(b[i]), out[i]);
        return;
    }
    const i64 BLOCK = 512;
    float total[BLOCK];
    for (i64 start = 0; start < n; start += BLOCK) {
        const i64 count = std::min(BLOCK, n - start);
        for (i64 i = 0; i < count; i++) total[i] = widen(parts[0][start + i]);
        for (i64 r = 1; r < size; r++) {
            for (i64 i = 0; i < count; i++) total[i] += widen(parts[r][start + i]);
            // The compiler may add in another order (-fassociative-math), but not across this.
            asm volatile("" : : "r"(total) : "memory");
        }
        for (i64 i = 0; i < count; i++) narrow(total[i], out[start + i]);
    }
}

template <typename T>
bool sum_at_once(Rank& g, const T* x, T* y, i64 n, i64 word) {
    const i64 epoch = g.epoch;
    std::memcpy(buffer(g, g.rank, epoch), x, n * sizeof(T));
    if (!meet(g, word)) return false;
    const T* parts[MAX_RANKS];
    for (i64 r = 0; r < g.size; r++)
        parts[r] = r == g.rank ? x : reinterpret_cast<const T*>(buffer(g, r, epoch));
    add_parts(parts, g.size, y, n);
    return true;
}

template <typename T>
bool sum_in_two_phases(Rank& g, const T* x, T* y, i64 n, i64 word) {
    const i64 slice = round_up((n + g.size - 1) / g.size, LINE);
    auto first = [&](i64 rank) { return std::min(n, rank * slice); };
    const i64 start = first(g.rank), stop = first(g.rank + 1), epoch = g.epoch;
    // No rank reads its own slice of what it writes.
    T* own = reinterpret_cast<T*>(buffer(g, g.rank, epoch));
    std::memcpy(own, x, start * sizeof(T));
    std::memcpy(own + stop, x + stop, (n - stop) * sizeof(T));
    if (!meet(g, word)) return false;
    const T* parts[MAX_RANKS];
    for (i64 r = 0; r < g.size; r++)
        parts[r] = (r == g.rank ? x : reinterpret_cast<const T*>(buffer(g, r, epoch))) + start;
    add_parts(parts, g.size, y + start, stop - start);
    std::memcpy(reinterpret_cast<T*>(buffer(g, g.rank, epoch + 1)) + start, y + start,
                (stop - start) * sizeof(T));
    if (!meet(g, word)) return false;
    for (i64 r = 0; r < g.size; r++)
        if (r != g.rank)
            std::memcpy(y + first(r),
                        reinterpret_cast<const T*>(buffer(g, r, epoch + 1)) + first(r),
                        (first(r + 1) - first(r)) * sizeof(T));
    return true;
}

template <typename T>
void sum(Rank& g, const T* x, T* y, i64 n, i64 word) {
    const i64 most = g.buffer_bytes / i64(sizeof(T));
    for (i64 start = 0; start < n; start += most) {
        const i64 count = std::min(most, n - start);
        const bool at_once = count * i64(sizeof(T)) <= MAX_BYTES_AT_ONCE;
        if (!(at_once ? sum_at_once<T> : sum_in_two_phases<T>)(g, x + start, y + start, count,
                                                               word))
            return;
    }
}

}  // namespace

// y may be x.
extern "C" void rank_sum(i64* rank, const void* x, void* y, i64 num_rows, i64 width,
                         i64 is_bfloat16, i64 digest) {
    Rank& g = *reinterpret_cast<Rank*>(rank);
    const i64 n = num_rows * width;
    if (!begin(g)) return;
    is_bfloat16
        ? sum(g, static_cast<const bf16*>(x), static_cast<bf16*>(y), n, word_of(SUM, 1, n, digest))
        : sum(g, static_cast<const float*>(x), static_cast<float*>(y), n,
              word_of(SUM, 0, n, digest));
}

// To all ranks (to = -1) or one; out [size, num_bytes].
extern "C" void rank_gather(i64* rank, const void* x, void* out, i64 num_bytes, i64 to,
                            i64 digest) {
    Rank& g = *reinterpret_cast<Rank*>(rank);
    const i64 word = word_of(GATHER, (to + 1) & 7, num_bytes, digest);
    if (!begin(g)) return;
    for (i64 start = 0; start < num_bytes; start += g.buffer_bytes) {
        const i64 count = std::min(g.buffer_bytes, num_bytes - start), epoch = g.epoch;
        std::memcpy(buffer(g, g.rank, epoch), static_cast<const char*>(x) + start, count);
        if (!meet(g, word)) return;
        if (to >= 0 && to != g.rank) continue;
        for (i64 r = 0; r < g.size; r++)
            std::memcpy(static_cast<char*>(out) + r * num_bytes + start, buffer(g, r, epoch),
                        count);
    }
}

// number: replaced by rank 0's.
extern "C" void rank_agree(i64* rank, i64* number, i64 digest) {
    Rank& g = *reinterpret_cast<Rank*>(rank);
    const i64 slot = g.epoch & 1;
    if (!begin(g)) return;
    page(g, g.rank).numbers[slot] = *number;
    if (meet(g, word_of(AGREE, 0, 0, digest))) *number = page(g, 0).numbers[slot];
}
