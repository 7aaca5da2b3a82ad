// What the kernels compute, as records, and the table of the functions that compute it with one instruction set in one
// dtype (T: fp32 or bf16). Pointers of void and char are to T.
//
// Each set is a translation unit of its own (avx2.cpp, amx.cpp ...) that instantiates the templates of gemm.h,
// elementwise.h, attention.h, decode_step.h, routing.h and experts.h for its instructions. All of them lie in anonymous namespaces, and nothing
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

// What a block of K or V takes for one head: values in T, or whole numbers of 8 bits, behind which lies the scale of each
// token. These have the order of bf16, in whichever T is computed: K [block_size / 16, dim / 2, 16, 2] and V
// [block_size / 2, dim, 2]
INLINE int64_t numbers_of_head(int64_t block_size, int64_t dim) { return block_size * dim; }
INLINE int64_t int8_head_bytes(int64_t block_size, int64_t dim) {
    return numbers_of_head(block_size, dim) + block_size * (int64_t)sizeof(float);
}

// packed; bits 0: in T, as diptych_pack leaves it; 8 or 4: in whole numbers, see quantized_gemm.h
struct Weight {
    const char *w;
    const char *bias;  // [n] or null, in the order of the packed columns: see gemm.h
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

// what becomes of the results of a gate and of those that it is multiplied with: see gated in exponential.h
enum GateKind : int64_t { NO_GATE = 0, SILU = 1, GELU_TANH = 2, CLAMPED_SWISH = 3 };
struct Gate {
    int64_t kind;
    float limit, alpha;  // of CLAMPED_SWISH
    explicit operator bool() const { return kind != NO_GATE; }
};
constexpr Gate NOT_GATED{NO_GATE, 0.0f, 0.0f};

// y = x W^T (+ bias), or what a Gate makes of it
struct Linear {
    const char *x;     // [m, k]
    Weight weight;     // [n, k]
    char *y;           // [m, n], or [m, n / 2] when gated
    int64_t m, n, k, x_stride, y_stride;  // strides in elements
    Gate gate;
};

// the gated MLP of an expert
struct Expert {
    Weight gate_up, down;  // [2 inner, hidden], gated; [hidden, inner]
};

// y = the sum of what the chosen experts give for each row, times their weights: see experts.h
struct Experts {
    const Expert *experts;  // [count]
    const char *x;          // [rows, hidden], rows x_stride apart (in elements)
    const int64_t *chosen;  // [rows, top_k], each expert of a row once
    const float *weights;   // [rows, top_k]
    char *y;                // [rows, hidden]
    int64_t rows, count, top_k, hidden, inner, x_stride;
    Gate gate;
};

// how the logits of a router become the experts of a row and their weights: see routing.h
enum Scoring : int64_t { SOFTMAX = 0, SOFTMAX_OF_TOP = 1, SIGMOID = 2, SPARSEMIXER = 3 };
struct Routing {
    const float *correction;  // [count] or null: what is added to scores to choose by
    int64_t scoring, count, top_k, is_normalized;
    float scale, jitter;
};

// the experts of rows, in ascending order, and their weights
struct Choice {
    const char *logits;  // [rows, count] of T, or of fp32 where is_wide
    int64_t is_wide, rows;
    Routing routing;
    int64_t *chosen;     // [rows, top_k]
    float *weights;      // [rows, top_k]
};

// a layer's mixture of experts. shared: an expert of all rows, whose gate_up.w is null where there is none
struct Mixture {
    Weight router;          // [count, hidden] of T, or of fp32 where router_is_wide
    Routing routing;
    const Expert *experts;  // [count]
    Expert shared;
    int64_t router_is_wide, inner, shared_inner;
    Gate gate;              // of all experts
};

// of an RMS norm. is_wide: in fp32, and the product is rounded to T once; else in T, and the normed value is rounded
// before it is multiplied, too
struct NormWeight {
    const char *weight;  // null where there is no such norm
    int64_t is_wide;
    float eps;
};

// out = rms_norm(x), or residual += multiplier * x; out = rms_norm(residual). out may be x
struct Norm {
    const char *x;      // [rows, dim]
    char *residual;     // [rows, dim] or null
    NormWeight weight;  // [dim]; without one, only the sum is computed
    char *out;          // [rows, dim]
    int64_t rows, dim;
    float multiplier;
};

// out = activation(gate) * up
struct Activation {
    const char *gate_up;  // [rows, 2 dim]
    char *out;            // [rows, dim]
    int64_t rows, dim;
    Gate gate;
};

// x *= sigmoid(gate)
struct Gating {
    char *x;           // [rows, dim]
    const char *gate;  // [rows, dim]
    int64_t rows, dim;
};

// x = cap * tanh(x / cap)
struct Softcap {
    char *x;  // [rows, dim]
    int64_t rows, dim;
    float cap;
};

struct Rope {
    char *qkv;                 // [rows, (heads + 2 kv_heads) * dim]
    const int64_t *positions;  // [rows]
    const float *cos_sin;      // [positions, rotary]
    const float *query_scale;  // [positions] or null: of rotated queries
    const int64_t *slots;      // [rows]
    char *k_cache, *v_cache;
    NormWeight q_norm, k_norm;  // [dim] each, or of all heads side by side
    int64_t rows, heads, kv_heads, dim, rotary, block_size;  // rotary: the values of a head that are rotated
    int64_t norms_rows;  // whether a norm is over all heads together
    int64_t is_int8;     // whether the cache holds whole numbers
};

struct Attention {
    const char *q;  // [tokens, heads, dim], rows q_stride apart (in elements)
    const char *k_cache, *v_cache;
    const int32_t *block_tables;  // [seqs, table_stride]; of blocks before a window, anything
    const int32_t *query_start;   // [seqs + 1]
    const int32_t *context_lens;  // [seqs]
    char *out;                    // [tokens, heads, dim]
    float *partials;              // [decode tasks, group, dim + 2]
    int64_t q_stride, table_stride, seqs, decodes, heads, kv_heads, dim, block_size, window;
    int64_t is_int8;      // see Rope
    float scale, softcap;  // softcap 0: none
    const float *sinks;    // [heads] or null: a score of each head that has a share of the weights and no value
};

// a causal convolution of each channel over the newest tokens, gated before and behind it: out = c * (bias + the sum over
// taps of weight * (b * x)); the last tap is the token's own
constexpr int64_t MAX_TAPS = 16;
struct Convolution {
    const char *projected;       // [rows, 3 width]: b, c and x
    const char *weight, *bias;   // [taps, width]; [width] or null
    const char *before;          // [seqs, taps - 1, width]: b * x of the tokens before each sequence's first row
    const int32_t *query_start;  // [seqs + 1]
    char *inputs, *out;          // [rows, width]: b * x, and the result
    int64_t rows, seqs, width, taps;
};

// where the cache keeps b * x of a layer's tokens: K of all heads, then V, filled up with zeros
struct InputsCache {
    char *k_cache, *v_cache;
    int64_t group;  // see Layer
};
struct LayerConvolution {
    const char *weight, *bias;  // see Convolution
    const InputsCache *caches;  // side by side
    int64_t taps, num_caches;
};

// norms: before and after attention and MLP, [hidden]
struct Layer {
    NormWeight input_norm, attention_norm, mlp_norm, output_norm;
    Weight qkv, attention_gate, output, gate_up, down;  // attention_gate: of what attention gives, w null where it has none
    NormWeight q_norm, k_norm;                          // see Rope
    const Mixture *mixture;                             // in place of gate_up and down, where it is not null
    const LayerConvolution *convolution;                // in place of attention, where it is not null
    const float *cos_sin, *query_scale, *sinks;         // see Rope, Attention
    char *k_cache, *v_cache;
    int64_t window, rotary, norms_rows, inner_size, group;  // group: of layers, whose slots and block tables it has
    Gate gate;
    float scale, softcap;  // see Attention
};

// one token of each of `rows` sequences through all layers
struct Step {
    const Layer *layers;
    NormWeight norm;                 // [hidden]: behind the last layer
    char *residual;                  // [rows, hidden]: the tokens' embeddings; overwritten
    char *x;                         // [rows, hidden]: the result
    // scratch: [rows, (heads + 2 kv_heads) * dim], or 3 hidden where that is more and there are convolutions; two of
    // [rows, heads * dim], the first likewise hidden
    char *qkv, *attended, *gates;
    char *inner;                     // scratch: [rows, the widest inner_size or shared_inner]
    float *partials;                 // scratch, see Attention
    const int64_t *positions;          // [rows]
    const int64_t *const *slots;       // by group of layers: [rows]
    const int32_t *const *block_tables;  // by group of layers, see Attention
    const int32_t *query_start, *context_lens;  // see Attention
    int64_t num_layers, rows, hidden, heads, kv_heads, dim, block_size, table_stride;
    int64_t is_int8;                 // see Rope
    float multiplier;                // of what is added to residual
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
    void (*wide_linear)(const Kernels &, const Linear &);  // in fp32, whatever T is
    void (*norm)(const Norm &);
    void (*activate)(const Activation &);
    void (*gate)(const Gating &);
    void (*softcap)(const Softcap &);
    void (*rope_and_cache)(const Rope &);
    void (*convolve)(const Convolution &);
    void (*attention)(const Attention &);
    void (*decode_step)(const Kernels &, const Step &);
    void (*choose)(const Choice &);
    void (*experts)(const Kernels &, const Experts &);
    TeamLinear *quantized;  // of weights in whole numbers
};

extern const Kernels AVX2_FP32, AVX2_BF16, AVX512_FP32, AVX512_WIDENED_BF16, AVX512_BF16, AMX_BF16, AMX_EMULATED_BF16;

// whole numbers have instructions of their own, which not all processors with AVX2 or AVX-512 have
struct QuantizedKernels {
    TeamLinear *fp32, *bf16;
};

extern const QuantizedKernels QUANTIZED_AVX2, QUANTIZED_AVX2_VNNI, QUANTIZED_AVX512, QUANTIZED_AVX512_VNNI;
extern TeamLinear quantized_amx, quantized_amx_emulated;
