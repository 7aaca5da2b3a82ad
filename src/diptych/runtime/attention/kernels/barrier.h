// A barrier for the threads of a parallel region that meet every few microseconds: whoever comes first looks for the others
// a short while and then sleeps, so that a thread whose core is taken by another process does not cost its team a core.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {  // of each set: see kernels.h

class Barrier {
  public:
    // returns when `threads` threads have called; what they wrote before is visible to all
    void wait(int32_t threads) {
        const int32_t round = __atomic_load_n(&round_, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == threads) {
            __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round_, round + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
            return;
        }
        for (int spin = 0; spin < SPINS; spin++) {
            if (__atomic_load_n(&round_, __ATOMIC_ACQUIRE) != round) return;
            _mm_pause();
        }
        __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&round_, __ATOMIC_SEQ_CST) == round) futex(FUTEX_WAIT_PRIVATE, round);
        __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
    }

  private:
    static constexpr int SPINS = 2000;  // about 50 us: a team that has its cores waits less, and waking takes less

    void futex(int operation, int32_t value) { syscall(SYS_futex, &round_, operation, value, nullptr, nullptr, 0); }

    alignas(64) int32_t arrived_ = 0;
    alignas(64) int32_t round_ = 0;
    int32_t sleepers_ = 0;
};

// a Team's `barrier`, which each of its threads makes for itself
struct Meeting {
    Barrier *barrier;
    int32_t threads;
};
static void wait_at_meeting(void *meeting) { ((Meeting *)meeting)->barrier->wait(((Meeting *)meeting)->threads); }

}  // namespace
