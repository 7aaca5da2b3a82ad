// How a set multiplies whole numbers: units of four unsigned bytes (weights) against four signed bytes (rows of x), added
// to sums of 32 bits. Factor: four elements of a row as they are multiplied; FACTOR_BYTES of memory for each element.
#pragma once
#include "kernels.h"

namespace {

#ifdef HAS_VNNI
// one instruction
struct Dots {
    typedef Ints Operand;
    typedef Ints Factor;
    static constexpr int FACTOR_BYTES = 1, ROWS = MANY_REGISTERS ? 12 : 5, GROUPED_ROWS = MANY_REGISTERS ? 6 : 3;
    INLINE Operand units(Ints bytes) { return bytes; }
    INLINE Factor broadcast(const char *p) { return broadcast_4_bytes(p); }
    INLINE Ints mul_add(Ints sum, Operand w, Factor x) { return dot(sum, w, x); }
    INLINE void put(char *out, Ints whole) { store_bytes(out, whole); }
};
#else
// as 16 bits, in two sums of pairs: the first and third byte of a unit, the second and fourth. A product of bytes fits,
// the sum of two would not
struct Pairs {
    struct Operand {
        Ints even, odd;
    };
    typedef Operand Factor;
    static constexpr int FACTOR_BYTES = 2, ROWS = MANY_REGISTERS ? 10 : 4, GROUPED_ROWS = MANY_REGISTERS ? 5 : 2;
    INLINE Operand units(Ints bytes) { return {even_bytes(bytes), odd_bytes(bytes)}; }
    INLINE Factor broadcast(const char *p) { return {broadcast_4_bytes(p), broadcast_4_bytes(p + 4)}; }
    INLINE Ints mul_add(Ints sum, Operand w, Factor x) {
        return add(add(sum, sums_of_pairs(w.even, x.even)), sums_of_pairs(w.odd, x.odd));
    }
    INLINE void put(char *out, Ints whole) { store_even_then_odd(out, whole); }
};
#endif

}  // namespace
