// Runs a list of calls of kernels, as `trace.py` writes it. A decode step of a small model has no
// time for a Python function for each.

#include <chrono>
#include <utility>

#include "tiles/tiles.h"

namespace {

// How an argument is given, by two numbers a and b.
enum Kind : i64 {
    CONSTANT,  // b
    STEP,      // number a of the step, plus b
    ROWS,  // rows of the step's own memory: their width times the number of rows, which begin at a,
           // plus b
};
// Numbers of the step that every list reads.
enum { NUM_ROWS, MEMORY };

const int MAX_ARGUMENTS = 64;

template <typename T>
T as(i64 bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename... A, size_t... I>
void invoke(void (*kernel)(A...), const i64* arguments, std::index_sequence<I...>) {
    kernel(as<A>(arguments[I])...);
}

template <auto kernel>
struct Call;
template <typename... A, void (*kernel)(A...)>
struct Call<kernel> {
    static void run(const i64* arguments) {
        invoke(kernel, arguments, std::index_sequence_for<A...>());
    }
};

// Sites at the end, three numbers each: as many arguments as there are.
void add_adapters_to_sites(const i64* a) {
    add_adapters(as<const void*>(a[0]), a[1], a[2], as<const i64*>(a[3]), as<const i64*>(a[4]),
                 a[5], as<const i64*>(a[6]), a[7], a + 12, a[11], a[8], a[9], a[10]);
}

struct Kernel {
    const char* name;
    void (*run)(const i64* arguments);
};

const Kernel KERNELS[] = {
#ifdef HAS_AMX
    {"int8_product_by_tiles", Call<int8_product_by_tiles>::run},
    {"product_onto", Call<product_onto>::run},
    {"gated_product", Call<gated_product>::run},
    {"paged_attention_by_tiles", Call<paged_attention_by_tiles>::run},
#endif
#ifdef HAS_TILES
    {"product", Call<product>::run},
    {"attend_in_pieces", Call<attend_in_pieces>::run},
#endif
#ifdef HAS_PAIRS
    {"pair_product", Call<pair_product>::run},
    {"int8_pair_product", Call<int8_pair_product>::run},
#endif
    {"vector_product", Call<vector_product>::run},
    {"float32_product", Call<float32_product>::run},
    {"int8_product_bfloat16", Call<int8_product_bfloat16>::run},
    {"int8_product_float32", Call<int8_product_float32>::run},
    {"paged_attention_bfloat16", Call<paged_attention_bfloat16>::run},
    {"paged_attention_float32", Call<paged_attention_float32>::run},
    {"rms_norm", Call<rms_norm>::run},
    {"silu_mul", Call<silu_mul>::run},
    {"rope", Call<rope>::run},
    {"add", Call<add>::run},
    {"store_rows", Call<store_rows>::run},
    {"add_adapters", add_adapters_to_sites},
    {"keep_rows", Call<keep_rows>::run},
    {"attend_in_windows", Call<attend_in_windows>::run},
    {"rank_sum", Call<rank_sum>::run},
};

}  // namespace

// Copies each row to its entry of a page: x [n, row_bytes], pages and offsets [n]; all steps in
// bytes.
extern "C" void store_rows(const void* x, i64 x_step, void* store, i64 page_step, const i64* pages,
                           const i64* offsets, i64 num_rows, i64 row_bytes) {
    for (i64 i = 0; i < num_rows; i++)
        std::memcpy(static_cast<char*>(store) + pages[i] * page_step + offsets[i] * row_bytes,
                    static_cast<const char*>(x) + i * x_step, row_bytes);
}

// Writes the numbers by which lists call kernels, for each name in `names`, separated by spaces; -1
// for a kernel that was not compiled.
extern "C" void kernel_numbers(const char* names, i64* numbers) {
    const char* start = names;
    for (i64 i = 0; *start; i++) {
        const char* end = std::strchr(start, ' ');
        const size_t length = end ? end - start : std::strlen(start);
        numbers[i] = -1;
        for (size_t k = 0; k < sizeof KERNELS / sizeof *KERNELS; k++)
            if (std::strlen(KERNELS[k].name) == length &&
                !std::strncmp(KERNELS[k].name, start, length))
                numbers[i] = k;
        start += length + (end != nullptr);
    }
}

// calls: for each its kernel, the number of its arguments, and three numbers for each of them.
// step: the step's numbers. nanoseconds: where the time of each call is written, or null.
extern "C" void run_calls(const i64* calls, i64 num_calls, const i64* step, i64* nanoseconds) {
    for (i64 call = 0; call < num_calls; call++) {
        const Kernel& kernel = KERNELS[*calls++];
        const i64 count = *calls++;
        i64 arguments[MAX_ARGUMENTS];
        if (count > MAX_ARGUMENTS) std::abort();
        for (i64 i = 0; i < count; i++, calls += 3) {
            const i64 a = calls[1], b = calls[2];
            arguments[i] = calls[0] == CONSTANT ? b
                           : calls[0] == STEP   ? step[a] + b
                                                : step[MEMORY] + a * step[NUM_ROWS] + b;
        }
        if (!nanoseconds) {
            kernel.run(arguments);
            continue;
        }
        const auto start = std::chrono::steady_clock::now();
        kernel.run(arguments);
        nanoseconds[call] =
            std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    }
}
