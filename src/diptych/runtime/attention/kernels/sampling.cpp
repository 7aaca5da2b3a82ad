// Softmax weights as whole numbers: bit for bit what runtime/sampling/whole_weights.py says, which has the reasons.
//
// Written for 8 lanes without intrinsics; additions and multiplications round one by one (no contraction, see setup.py).
#include <cstdint>
#include <cstring>
#pragma GCC target("avx2")

namespace {

constexpr int64_t LANES = 8;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr float LOWEST = -64.0f, ROUNDER = 12582944.0f;  // 1.5 * 2**23 + 32
constexpr float HAS_NO_FRACTION = 8388608.0f;            // 2**23, and every float above it
constexpr float COEFFICIENTS[] = {0.0013264717999845743f, 0.009671512991189957f, 0.05550733953714371f,
                                  0.24022242426872253f,   0.6931470036506653f};

inline Floats weights_of(Floats logits, float best, float factor) {
    Floats x = (logits - best) * factor;
    x = x > LOWEST ? x : Floats{} + LOWEST;
    const Floats whole = x + ROUNDER;
    x = x - (whole - ROUNDER);
    Floats power = x * COEFFICIENTS[0];
    for (int i = 1; i < 5; i++) power = (power + COEFFICIENTS[i]) * x;
    power = power + 1.0f;
    power = (Floats)((Ints)power + ((Ints)whole << 23));
    const Floats rounded = (power + HAS_NO_FRACTION) - HAS_NO_FRACTION;
    return power < HAS_NO_FRACTION ? rounded : power;
}

}  // namespace

extern "C" {

// logits and weights [count]
void diptych_whole_weights(const float *logits, float *weights, int64_t count, float best, float factor) {
    Floats some = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        memcpy(&some, logits + i, sizeof some);
        some = weights_of(some, best, factor);
        memcpy(weights + i, &some, sizeof some);
    }
    if (i == count) return;
    some = Floats{} + best;
    memcpy(&some, logits + i, 4 * (count - i));
    some = weights_of(some, best, factor);
    memcpy(weights + i, &some, 4 * (count - i));
}
}
