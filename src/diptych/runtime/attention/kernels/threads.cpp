// Where the threads of the OpenMP pool run. A pool that waits at barriers is as slow as its slowest thread, and a scheduler
// that puts two of them on one core, because something unimportant runs on the other, makes every step many times slower.
#include <cstdint>

#if defined(__linux__)
#include <omp.h>
#include <sched.h>
#endif

extern "C" {

// thread i of the calling thread's pool may run on cores[i] alone; returns how many threads were bound
int64_t diptych_bind_threads(const int64_t *cores, int64_t count) {
    int64_t bound = 0;
#if defined(__linux__)
#pragma omp parallel num_threads(count) reduction(+ : bound)
    {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cores[omp_get_thread_num() % count], &set);
        bound += sched_setaffinity(0, sizeof set, &set) == 0;
    }
#endif
    return bound;
}
}
