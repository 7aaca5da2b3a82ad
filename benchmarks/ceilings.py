"""What the processor can do at most, measured in the same run as what is compared with it.

Loops of multiply-adds on registers, one for each kind of instruction that kernels are made of, and a loop that only
loads. They are compiled here; a kind that the processor or the compiler lacks is left out.
"""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STEPS = 2_000_000  # of a loop
READ_FLOATS = 1 << 27

COMMON = r"""
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define LOOP(SUM, ZERO, FACTOR, ONE, OP)                                                       \
    extern "C" long run(long n) {                                                              \
        SUM s[12]; FACTOR a = ONE, b = a;                                                      \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) s[i] = ZERO;                     \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) asm volatile("" : "+v"(s[i]));   \
        while (n--) {                                                                          \
            _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) s[i] = OP;                   \
            asm volatile("" : "+v"(a), "+v"(b));                                               \
        }                                                                                      \
        long sink = 0;                                                                         \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) sink += ((const int *)&s[i])[0]; \
        return sink;                                                                           \
    }
"""
TILES = r"""
extern "C" long run(long n) {
    alignas(64) unsigned char config[64] = {1};
    for (int t = 0; t < 8; t++) { config[16 + 2 * t] = 64; config[48 + t] = 16; }
    syscall(SYS_arch_prctl, 0x1023, 18);  // ask for the registers of AMX
    _tile_loadconfig(config);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
    while (n--) { OP(0, 4, 6); OP(1, 4, 7); OP(2, 5, 6); OP(3, 5, 7); }
    _tile_release();
    return 0;
}
"""
READ = r"""
extern "C" long run(const float *p, long n) {
    typedef float V __attribute__((vector_size(32)));
    V s[8] = {};
    const long each = n / 8 / 32 * 32;  // eight places at once: one alone does not keep the memory busy everywhere
    for (long at = 0; at < each; at += 32)
        for (int place = 0; place < 8; place++) {
            const float *q = p + place * each + at;
            __builtin_prefetch(q + 1024);
            __builtin_prefetch(q + 1040);
            for (int i = 0; i < 4; i++) s[place] += *(const V *)(q + i * 8);
        }
    float r = 0;
    for (int i = 0; i < 8; i++) r += s[i][0];
    return (long)r;
}
"""


@dataclass(frozen=True, slots=True)
class PeakLoop:
    """A loop of multiply-adds. kind: of products. flag: of /proc/cpuinfo. target: for the compiler. operations:
    multiplications and additions of a step."""

    kind: str
    flag: str
    target: str
    operations: int
    body: str


PEAK_LOOPS = (
    PeakLoop(
        "fp32", "avx2", "avx2,fma", 12 * 16,
        "LOOP(__m256, _mm256_setzero_ps(), __m256, _mm256_set1_ps(1), _mm256_fmadd_ps(a, b, s[i]))",
    ),
    PeakLoop(
        "fp32", "avx512f", "avx512f", 12 * 32,
        "LOOP(__m512, _mm512_setzero_ps(), __m512, _mm512_set1_ps(1), _mm512_fmadd_ps(a, b, s[i]))",
    ),
    PeakLoop(
        "bf16", "avx512_bf16", "avx512f,avx512bf16", 12 * 64,
        "LOOP(__m512, _mm512_setzero_ps(), __m512bh, (__m512bh)_mm512_set1_ps(1), _mm512_dpbf16_ps(s[i], a, b))",
    ),
    PeakLoop(
        "int8", "avx2", "avx2", 12 * 64,
        "LOOP(__m256i, _mm256_setzero_si256(), __m256i, _mm256_set1_epi8(1),"
        " _mm256_add_epi32(s[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b)))",
    ),
    PeakLoop(
        "int8", "avx_vnni", "avx2,avxvnni", 12 * 64,
        "LOOP(__m256i, _mm256_setzero_si256(), __m256i, _mm256_set1_epi8(1), _mm256_dpbusd_avx_epi32(s[i], a, b))",
    ),
    PeakLoop(
        "int8", "avx512_vnni", "avx512f,avx512bw,avx512vnni", 12 * 128,
        "LOOP(__m512i, _mm512_setzero_si512(), __m512i, _mm512_set1_epi8(1), _mm512_dpbusd_epi32(s[i], a, b))",
    ),
    PeakLoop("amx_bf16", "amx_bf16", "amx-tile,amx-bf16", 4 * 16 * 16 * 64, "#define OP _tile_dpbf16ps" + TILES),
    PeakLoop("amx_int8", "amx_int8", "amx-tile,amx-int8", 4 * 16 * 16 * 128, "#define OP _tile_dpbssd" + TILES),
)  # fmt: skip


def best_of(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[float]:
    """Seconds of each call, taking turns: the best of ``repetitions``. With one thread the thread's own processor time
    counts, else wall time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(calls)
    for _ in range(repetitions + 1):
        for index, call in enumerate(calls):
            began = clock()
            call()
            best[index] = min(best[index], clock() - began)
    return best


def measure_ceilings(repetitions: int) -> dict[str, float]:
    """Ceilings of as many threads together as torch has: ``KIND_gflops`` of each kind of products that there is, and
    ``read_gbps``, streaming from memory. Empty without a compiler."""
    if shutil.which("g++") is None:
        return {}
    flags, threads = _flags(), torch.get_num_threads()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        for loop in PEAK_LOOPS:
            run = _compiled(Path(folder), loop) if loop.flag in flags else None
            if run is not None:
                run.argtypes = [ctypes.c_long]
                (seconds,) = best_of([lambda run=run: _together(pool, threads, lambda _: run(STEPS))], repetitions)
                gflops = round(threads * loop.operations * STEPS / seconds / 1e9, 1)
                found[f"{loop.kind}_gflops"] = max(gflops, found.get(f"{loop.kind}_gflops", 0.0))
        if (read := plain_read()) is not None:
            found["read_gbps"] = round(read.num_bytes / best_of([read], repetitions)[0] / 1e9, 1)
    return found


class PlainRead:
    """Streams ``num_bytes`` from memory when it is called, in as many threads as torch has."""

    def __init__(self, run: Any) -> None:
        run.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self._run, self._threads, self._floats = run, torch.get_num_threads(), torch.ones(READ_FLOATS)
        self._share = READ_FLOATS // self._threads // 256 * 256
        self._pool = ThreadPoolExecutor(self._threads)
        self.num_bytes = 4 * self._share * self._threads

    def __call__(self) -> None:
        begin, share = self._floats.data_ptr(), self._share
        _together(self._pool, self._threads, lambda number: self._run(begin + 4 * share * number, share))


def plain_read() -> PlainRead | None:
    """A PlainRead; None without a compiler."""
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        run = _compiled(Path(folder), PeakLoop("read", "", "avx2", 0, READ))
    return None if run is None else PlainRead(run)


def _together(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], Any]) -> None:
    """``work(number)`` in each thread; in this one if it is alone, whose processor time is measured."""
    if threads == 1:
        work(0)
    else:
        list(pool.map(work, range(threads)))


def _compiled(folder: Path, loop: PeakLoop) -> Any:
    """The function of a loop; None where the compiler cannot."""
    source, built = folder / "loop.cpp", folder / f"{loop.kind}-{loop.target.replace(',', '-')}.so"
    source.write_text(f'#pragma GCC target("{loop.target}")\n{COMMON}\n{loop.body}\n')
    command = ["g++", "-O2", "-shared", "-fPIC", "-w", str(source), "-o", str(built)]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    function = ctypes.CDLL(str(built)).run
    function.restype = ctypes.c_long
    return function


def _flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
