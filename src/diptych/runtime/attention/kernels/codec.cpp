// The KV cache as bytes on a wire and back: the tiles of codec.py, single threaded, because they run in a transport's
// thread beside the model's. Bytes are the same as those of the torch code in codec_torch.py.
//
// A tile is 16 tokens of one head of K or V: 16 * dim neighbouring elements in the CPU layout of either dtype. Its bf16
// form is dim / 2 registers ("rows") of 16 units, and codes lie in that order whatever the dtype of the cache. A row's
// even and odd halves belong to two groups of values: two channels of K, or two tokens of V.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define HAS_AVX512_BF16
#include "vector_avx512.h"

namespace {

enum Encoding { BF16, FP32, INT8, INT4 };
constexpr int64_t TOKENS = 16, MAX_DIM = 256;

struct Job {
    const int64_t *caches, *blocks;  // addresses of K, V, K, V ... by layer; the block table
    uint8_t *wire;
    int64_t num_caches, start, num_tokens, heads, dim, block_size, has_bf16;
};

struct Pair {
    __m512 even, odd;
};

// Where row w of a tile lies. Groups: row i of K; two rows (32 channels) of V, the last of a token pair perhaps one.
template <typename T, bool IS_K> struct Tile {
    int64_t dim, rows_per_pair, groups_per_pair;
    INLINE Tile make(int64_t dim) { return {dim, dim / 16, (dim / 16 + 1) / 2}; }
    INLINE int64_t num_groups(const Tile &t) { return IS_K ? t.dim / 2 : TOKENS / 2 * t.groups_per_pair; }
    INLINE int64_t first_row(const Tile &t, int64_t group) {
        return IS_K ? group : group / t.groups_per_pair * t.rows_per_pair + group % t.groups_per_pair * 2;
    }
    INLINE int64_t num_rows(const Tile &t, int64_t group) {
        return !IS_K && (group % t.groups_per_pair + 1) * 2 <= t.rows_per_pair ? 2 : 1;
    }
    INLINE int64_t even(const Tile &t, int64_t row) {  // element of the first even value
        if (sizeof(T) == 2 || IS_K) return row * 32;
        return row / t.rows_per_pair * 2 * t.dim + row % t.rows_per_pair * 16;
    }
    INLINE int64_t to_odd(const Tile &t) { return IS_K ? 16 : t.dim; }  // fp32 only
};

INLINE __m512i high_half(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)); }

INLINE Pair widen_units(__m512i units) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(units, 16)), _mm512_castsi512_ps(high_half(units))};
}

// to nearest even in the upper 16 bits; a NaN becomes the one NaN 0x7fc0
INLINE __m512i round_bits(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

INLINE __m512i narrow_units(Pair p) {
    return _mm512_or_si512(_mm512_srli_epi32(round_bits(p.even), 16), high_half(round_bits(p.odd)));
}

// the same in two instructions, for values that are neither subnormal nor, after a product, NaN of any other kind
INLINE __m512i narrow_units_bf16(Pair p) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(p.odd, p.even));
}

template <typename T, bool IS_K>
INLINE Pair load_row(const Tile<T, IS_K> &t, const T *tile, int64_t row) {
    const T *p = tile + t.even(t, row);
    if (sizeof(T) == 2) return widen_units(_mm512_loadu_si512(p));
    return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + t.to_odd(t))};
}

template <typename T, bool IS_K, bool HAS_BF16>
INLINE void store_row(const Tile<T, IS_K> &t, T *tile, int64_t row, Pair v) {
    T *p = tile + t.even(t, row);
    if (sizeof(T) == 2) {
        _mm512_storeu_si512(p, HAS_BF16 ? narrow_units_bf16(v) : narrow_units(v));
    } else {
        _mm512_storeu_ps(p, v.even);
        _mm512_storeu_ps(p + t.to_odd(t), v.odd);
    }
}

// into memory that no cache holds, a call of memcpy per tile took 1.6 times as long
INLINE void copy(void *to, const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 256) {
        const __m512i a = _mm512_loadu_si512((const char *)from + i), b = _mm512_loadu_si512((const char *)from + i + 64);
        const __m512i c = _mm512_loadu_si512((const char *)from + i + 128);
        const __m512i d = _mm512_loadu_si512((const char *)from + i + 192);
        _mm512_storeu_si512((char *)to + i, a);
        _mm512_storeu_si512((char *)to + i + 64, b);
        _mm512_storeu_si512((char *)to + i + 128, c);
        _mm512_storeu_si512((char *)to + i + 192, d);
    }
}

// lane i: the largest lane of m[i], unsigned, in 32 bits or in both halves of them
template <int BITS>
INLINE __m512i maximum(__m512i a, __m512i b) {
    return BITS == 16 ? _mm512_max_epu16(a, b) : _mm512_max_epu32(a, b);
}

template <int BITS>
INLINE __m512i reduce_rows(__m512i *m) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        m[i] = maximum<BITS>(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        m[i] = maximum<BITS>(_mm512_unpacklo_epi64(m[2 * i], m[2 * i + 1]), _mm512_unpackhi_epi64(m[2 * i], m[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        m[i] = maximum<BITS>(_mm512_shuffle_i32x4(m[2 * i], m[2 * i + 1], 0x88),
                             _mm512_shuffle_i32x4(m[2 * i], m[2 * i + 1], 0xdd));
    return maximum<BITS>(_mm512_shuffle_i32x4(m[0], m[1], 0x88), _mm512_shuffle_i32x4(m[0], m[1], 0xdd));
}

// bits of the largest magnitudes of up to 16 groups: of the even values, of the odd values
template <typename T, bool IS_K>
INLINE void group_maxima(const Tile<T, IS_K> &t, const T *tile, int64_t first, int64_t count, __m512i *even,
                         __m512i *odd) {
    const __m512i magnitude = _mm512_set1_epi32(sizeof(T) == 2 ? 0x7fff7fff : 0x7fffffff);
    __m512i m[16];
    for (int half = 0; half < (sizeof(T) == 2 ? 1 : 2); half++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            m[i] = _mm512_setzero_si512();
            if (i >= count) continue;
            const int64_t row = t.first_row(t, first + i), offset = half * t.to_odd(t);
            m[i] = _mm512_and_si512(_mm512_loadu_si512(tile + t.even(t, row) + offset), magnitude);
            if (t.num_rows(t, first + i) == 2) {
                const __m512i next = _mm512_loadu_si512(tile + t.even(t, row + 1) + offset);
                m[i] = maximum<sizeof(T) * 8>(m[i], _mm512_and_si512(next, magnitude));
            }
        }
        (half ? *odd : *even) = reduce_rows<sizeof(T) * 8>(m);
    }
    if (sizeof(T) == 2) {
        *odd = high_half(*even);
        *even = _mm512_slli_epi32(*even, 16);
    }
}

// Scales of 16 groups: maximum / top, rounded up to bf16, at least 2^-126; NaN where the maximum is not finite.
INLINE __m512i scales_of(__m512i maxima, float one_over_top, float *inverse, int32_t *keep, __mmask16 *broken) {
    const __m512 wanted = _mm512_mul_ps(_mm512_castsi512_ps(maxima), _mm512_set1_ps(one_over_top));
    __m512i bits = high_half(_mm512_add_epi32(_mm512_castps_si512(wanted), _mm512_set1_epi32(0xffff)));
    bits = _mm512_max_epu32(bits, _mm512_set1_epi32(0x00800000));
    *broken = _mm512_cmpge_epu32_mask(maxima, _mm512_set1_epi32(0x7f800000));
    _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_castsi512_ps(bits)));
    _mm512_store_si512(keep, _mm512_maskz_mov_epi32(~*broken, _mm512_set1_epi32(-1)));
    return _mm512_mask_mov_epi32(bits, *broken, _mm512_set1_epi32(0x7fc00000));
}

template <Encoding E>
INLINE void store_codes(uint8_t *codes, int64_t row, __m512i even, __m512i odd) {
    const __m512i low = _mm512_and_si512(even, _mm512_set1_epi32(E == INT8 ? 0xff : 0xf));
    const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(odd, E == INT8 ? 8 : 4));
    if (E == INT8)
        _mm256_storeu_si256((__m256i *)(codes + row * 32), _mm512_cvtepi32_epi16(both));
    else
        _mm_storeu_si128((__m128i *)(codes + row * 16), _mm512_cvtepi32_epi8(both));
}

template <typename T, bool IS_K, Encoding E, bool CAREFUL>
INLINE void quantise(const Tile<T, IS_K> &t, const T *tile, int64_t first, int64_t count, const float *inverse,
                     const int32_t *keep, uint8_t *codes) {
    for (int64_t i = 0; i < count; i++) {
        const __m512 even = _mm512_set1_ps(inverse[i]), odd = _mm512_set1_ps(inverse[16 + i]);
        const int64_t row = t.first_row(t, first + i), rows = t.num_rows(t, first + i);
        for (int64_t r = row; r < row + rows; r++) {
            const Pair v = load_row(t, tile, r);
            __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(v.even, even));
            __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(v.odd, odd));
            if (CAREFUL) {
                a = _mm512_and_si512(a, _mm512_set1_epi32(keep[i]));
                b = _mm512_and_si512(b, _mm512_set1_epi32(keep[16 + i]));
            }
            store_codes<E>(codes, r, a, b);
        }
    }
}

template <typename T, bool IS_K, Encoding E>
INLINE void encode_tile(const T *tile, int64_t dim, uint8_t *wire) {
    const Tile<T, IS_K> t = Tile<T, IS_K>::make(dim);
    if (E == FP32 || E == BF16 && sizeof(T) == 2) {
        copy(wire, tile, TOKENS * dim * sizeof(T));
        return;
    }
    if (E == BF16) {
        for (int64_t r = 0; r < dim / 2; r++) _mm512_storeu_si512(wire + r * 64, narrow_units(load_row(t, tile, r)));
        return;
    }
    const int64_t groups = t.num_groups(t);
    uint8_t *codes = wire + groups * 4;
    alignas(64) float inverse[32];
    alignas(64) int32_t keep[32];
    for (int64_t g = 0; g < groups; g += 16) {
        const int64_t count = groups - g < 16 ? groups - g : 16;
        __m512i even, odd;
        __mmask16 broken, broken_odd;
        group_maxima(t, tile, g, count, &even, &odd);
        const float one_over_top = E == INT8 ? 1.0f / 127.0f : 1.0f / 7.0f;
        even = scales_of(even, one_over_top, inverse, keep, &broken);
        odd = scales_of(odd, one_over_top, inverse + 16, keep + 16, &broken_odd);
        _mm512_mask_storeu_epi32(wire + g * 4, tail_mask(count), _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
        if (broken | broken_odd)
            quantise<T, IS_K, E, true>(t, tile, g, count, inverse, keep, codes);
        else
            quantise<T, IS_K, E, false>(t, tile, g, count, inverse, keep, codes);
    }
}

template <Encoding E>
INLINE Pair load_codes(const uint8_t *codes, int64_t row) {
    constexpr int BITS = E == INT8 ? 8 : 4;
    const __m512i both = E == INT8 ? _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(codes + row * 32)))
                                   : _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + row * 16)));
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 32 - BITS), 32 - BITS);
    return {_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(_mm512_srai_epi32(both, BITS))};
}

template <typename T, bool IS_K, Encoding E, bool HAS_BF16>
INLINE void decode_tile(T *tile, int64_t dim, const uint8_t *wire) {
    const Tile<T, IS_K> t = Tile<T, IS_K>::make(dim);
    if (E == FP32 || E == BF16 && sizeof(T) == 2) {
        copy(tile, wire, TOKENS * dim * sizeof(T));
        return;
    }
    if (E == BF16) {
        for (int64_t r = 0; r < dim / 2; r++)
            store_row<T, IS_K, HAS_BF16>(t, tile, r, widen_units(_mm512_loadu_si512(wire + r * 64)));
        return;
    }
    const int64_t groups = t.num_groups(t);
    const uint8_t *codes = wire + groups * 4;
    for (int64_t g = 0; g < groups; g++) {
        const Pair scale = widen_units(broadcast_unit(wire + g * 4));
        const int64_t row = t.first_row(t, g), rows = t.num_rows(t, g);
        for (int64_t r = row; r < row + rows; r++) {
            const Pair q = load_codes<E>(codes, r);
            store_row<T, IS_K, HAS_BF16>(t, tile, r, {_mm512_mul_ps(q.even, scale.even), _mm512_mul_ps(q.odd, scale.odd)});
        }
    }
}

// copies the first `count` tokens of a tile
template <typename T, bool IS_K>
void copy_tokens(T *to, const T *from, int64_t count, int64_t dim) {
    constexpr int L = 4 / sizeof(T);
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < dim; d++) {
            const int64_t i = IS_K ? (d / L * 16 + j) * L + d % L : (j / L * dim + d) * L + j % L;
            to[i] = from[i];
        }
}

int64_t tile_bytes(int64_t dim, bool is_k, Encoding e) {
    if (e == FP32 || e == BF16) return TOKENS * dim * (e == FP32 ? 4 : 2);
    return 4 * (is_k ? dim / 2 : TOKENS / 2 * ((dim / 16 + 1) / 2)) + TOKENS * dim * (e == INT8 ? 2 : 1) / 2;
}

template <typename T>
INLINE T *tile_at(const Job &job, int64_t cache, int64_t done, int64_t head) {
    const int64_t position = job.start + done, block = job.blocks[position / job.block_size];
    const int64_t before = (block * job.heads + head) * job.block_size + position % job.block_size;
    return (T *)job.caches[cache] + before * job.dim;
}

// neighbours on the wire are not neighbours in the cache, so the processor does not see the next tile coming
template <typename T>
INLINE void prefetch_after(const Job &job, int64_t cache, int64_t done, int64_t head) {
    if (++head == job.heads) head = 0, done += TOKENS;
    if (done >= job.num_tokens) return;
    const char *tile = (const char *)tile_at<T>(job, cache, done, head);
    for (int64_t i = 0; i < TOKENS * job.dim * (int64_t)sizeof(T); i += 64) _mm_prefetch(tile + i, _MM_HINT_T0);
}

template <typename T, bool IS_K, Encoding E, bool ENCODES, bool HAS_BF16>
void run_cache(const Job &job, int64_t cache, uint8_t *wire) {
    const int64_t dim = job.dim, size = tile_bytes(dim, IS_K, E);
    T part[TOKENS * MAX_DIM];
    for (int64_t done = 0; done < job.num_tokens; done += TOKENS) {
        const int64_t left = job.num_tokens - done;
        for (int64_t h = 0; h < job.heads; h++, wire += size) {
            T *tile = tile_at<T>(job, cache, done, h);
            if (ENCODES) prefetch_after<T>(job, cache, done, h);
            if (left >= TOKENS) {
                if (ENCODES)
                    encode_tile<T, IS_K, E>(tile, dim, wire);
                else
                    decode_tile<T, IS_K, E, HAS_BF16>(tile, dim, wire);
            } else if (ENCODES) {  // what lies behind the last token is nobody's: zeros go instead
                memset(part, 0, TOKENS * dim * sizeof(T));
                copy_tokens<T, IS_K>(part, tile, left, dim);
                encode_tile<T, IS_K, E>(part, dim, wire);
            } else {
                decode_tile<T, IS_K, E, HAS_BF16>(part, dim, wire);
                copy_tokens<T, IS_K>(tile, part, left, dim);
            }
        }
    }
}

template <typename T, Encoding E, bool ENCODES, bool HAS_BF16>
void run_all(const Job &job) {
    const int64_t tiles = (job.num_tokens + TOKENS - 1) / TOKENS * job.heads;
    uint8_t *wire = job.wire;
    for (int64_t c = 0; c < job.num_caches; c++) {
        const bool is_k = c % 2 == 0;
        is_k ? run_cache<T, true, E, ENCODES, HAS_BF16>(job, c, wire)
             : run_cache<T, false, E, ENCODES, HAS_BF16>(job, c, wire);
        wire += tiles * tile_bytes(job.dim, is_k, E);
    }
}

template <typename T, bool ENCODES, bool HAS_BF16>
void run(const Job &job, int64_t encoding) {
    if (encoding == INT8) return run_all<T, INT8, ENCODES, HAS_BF16>(job);
    if (encoding == INT4) return run_all<T, INT4, ENCODES, HAS_BF16>(job);
    if (encoding == BF16) return run_all<T, BF16, ENCODES, HAS_BF16>(job);
    if (sizeof(T) == 4) return run_all<T, FP32, ENCODES, HAS_BF16>(job);  // bf16 values never travel as fp32
}

Job job_of(const int64_t *caches, const int64_t *blocks, void *wire, const int64_t *s) {
    return {caches, blocks, (uint8_t *)wire, s[0], s[1], s[2], s[3], s[4], s[5], s[6]};
}

}  // namespace

extern "C" {

// sizes: num_caches, start, num_tokens, heads, dim, block_size, has_bf16
void diptych_kv_encode(const int64_t *caches, const int64_t *blocks, void *wire, const int64_t *sizes, int64_t encoding,
                       int64_t is_bf16) {
    const Job job = job_of(caches, blocks, wire, sizes);
    is_bf16 ? run<bf16, true, false>(job, encoding) : run<float, true, false>(job, encoding);
}

void diptych_kv_decode(const int64_t *caches, const int64_t *blocks, const void *wire, const int64_t *sizes,
                       int64_t encoding, int64_t is_bf16) {
    const Job job = job_of(caches, blocks, (void *)wire, sizes);
    if (!is_bf16) return run<float, false, false>(job, encoding);
    job.has_bf16 ? run<bf16, false, true>(job, encoding) : run<bf16, false, false>(job, encoding);
}
}
