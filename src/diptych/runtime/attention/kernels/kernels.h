// What the kernels compute, as records, and the table of the functions that compute it with one instruction set in one
// dtype (T: fp32 or bf16). Pointers of void and char are to T.
//
// Each set is a translation unit of its own (avx2.cpp, amx.cpp ...) that instantiates the templates of gemm.h,
// elementwise.h, attention.h and decode_step.h for its instructions. All of them lie in anonymous namespaces, and nothing
// from the C++ library is instantiated: a function compiled for AVX-512 must not be picked by the linker for code that
// runs elsewhere.
//
// One idea carries all of them: data that is multiplied lies in units of 32 bits, which hold one fp32 or two bf16 that
// belong to neighbouring steps of the sum. A vector holds 16 units of 16 different results. Each result is summed in the
// same order whatever the tile it is computed in: a row's result does not depend on the other rows of a batch.
#pragma once
#include <cstdint>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE static ALWAYS_INLINE

typedef uint16_t bf16;

constexpr int64_t SEGMENT = 256;  // tokens of attention that are one part of a sum, see attention.h
constexpr int64_t MAX_DIM = 256;  // of an attention head

// packed; bits 0: in T, as diptych_pack leaves it; 8 or 4: in whole numbers, see quantized_gemm.h
struct Weight {
    const char *w;
    const char *bias;  // [n] or null
    int64_t bits, group, has_mins;  // group: elements of K that share a scale
};

// the parts of a packed weight [n, k] in whole numbers, in bytes: the numbers of `elements` of K, the scales (or mins) of
// a group, a group, a panel of 32 columns
INLINE int64_t numbers_bytes(int64_t elements, int64_t bits) { return elements * 4 * bits; }
INLINE int64_t scales_bytes(const Weight &w, int64_t k) { return w.group == k ? 128 : 64; }
INLINE int64_t group_bytes(const Weight &w, int64_t k) {
    return numbers_bytes(w.group, w.bits) + scales_bytes(w, k) * (w.has_mins ? 2 : 1);
}
INLINE int64_t panel_bytes(const Weight &w, int64_t k) { return group_bytes(w, k) * (k / w.group); }

// y = x W^T (+ bias), or silu(gate) * up when gated
struct Linear {
    const char *x;     // [m, k]
    Weight weight;     // [n, k]
    char *y;           // [m, n], or [m, n / 2] when gated
    int64_t m, n, k, x_stride, y_stride;  // strides in elements
    bool gated;
};

// out = rms_norm(x), or residual += x; out = rms_norm(residual). out may be x
struct Norm {
    const char *x;       // [rows, dim]
    char *residual;      // [rows, dim] or null
    const char *weight;  // [dim]
    char *out;           // [rows, dim]
    int64_t rows, dim;
    float eps;
};

// out = silu(gate) * up
struct Activation {
    const char *gate_up;  // [rows, 2 dim]
    char *out;            // [rows, dim]
    int64_t rows, dim;
};

struct Rope {
    char *qkv;                 // [rows, (heads + 2 kv_heads) * dim]
    const int64_t *positions;  // [rows]
    const float *cos_sin;      // [positions, dim]
    const int64_t *slots;      // [rows]
    char *k_cache, *v_cache;
    const char *q_norm, *k_norm;  // [dim] or null
    int64_t rows, heads, kv_heads, dim, block_size;
    float eps;
};

struct Attention {
    const char *q;  // [tokens, heads, dim], rows q_stride apart (in elements)
    const char *k_cache, *v_cache;
    const int32_t *block_tables;  // [seqs, table_stride]
    const int32_t *query_start;   // [seqs + 1]
    const int32_t *context_lens;  // [seqs]
    char *out;                    // [tokens, heads, dim]
    float *partials;              // [decode tasks, group, dim + 2]
    int64_t q_stride, table_stride, seqs, decodes, heads, kv_heads, dim, block_size, window;
    float scale;
};

struct Layer {
    const char *input_norm, *mlp_norm;                      // [hidden]
    Weight qkv, output, gate_up, down;
    const char *q_norm, *k_norm;                            // [dim] or null
    char *k_cache, *v_cache;
    int64_t window;
};

// one token of each of `rows` sequences through all layers
struct Step {
    const Layer *layers;
    const char *norm;                // [hidden]: behind the last layer
    const float *cos_sin;            // [max positions, dim]
    char *residual;                  // [rows, hidden]: the tokens' embeddings; overwritten
    char *x;                         // [rows, hidden]: the result
    char *qkv, *attended, *inner;    // scratch: [rows, (heads + 2 kv_heads) * dim], [rows, heads * dim], [rows, inner_size]
    float *partials;                 // scratch, see Attention
    const int64_t *positions, *slots;  // [rows]
    const int32_t *block_tables, *query_start, *context_lens;  // see Attention
    int64_t num_layers, rows, hidden, inner_size, heads, kv_heads, dim, block_size, table_stride;
    float eps, scale;
};

// threads that compute one Linear: memory that all of them see, and how they wait for each other
struct Team {
    char *memory;
    void *barrier;
    void (*wait)(void *barrier);
};

typedef void TeamLinear(const Linear &, const Team &);

struct Kernels {
    void (*linear)(const Kernels &, const Linear &);
    void (*norm)(const Norm &);
    void (*silu_and_mul)(const Activation &);
    void (*rope_and_cache)(const Rope &);
    void (*attention)(const Attention &);
    void (*decode_step)(const Kernels &, const Step &);
    TeamLinear *quantized;  // of weights in whole numbers
};

extern const Kernels AVX2_FP32, AVX2_BF16, AVX512_FP32, AVX512_WIDENED_BF16, AVX512_BF16, AMX_BF16, AMX_EMULATED_BF16;

// whole numbers have instructions of their own, which not all processors with AVX2 or AVX-512 have
struct QuantizedKernels {
    TeamLinear *fp32, *bf16;
};

extern const QuantizedKernels QUANTIZED_AVX2, QUANTIZED_AVX2_VNNI, QUANTIZED_AVX512, QUANTIZED_AVX512_VNNI;
extern TeamLinear quantized_amx, quantized_amx_emulated;
