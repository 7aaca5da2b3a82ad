"""What tests of one end of a KV transfer share: a secret, a format, and a clock that the test sets."""

from diptych.runtime.transfer.kv_format import KVFormat

SECRET = b"0123456789abcdef" * 2
FORMAT = KVFormat("m", 3, 2, 32, "bfloat16", 16, "cpu")
MS = 10**6


class Clock:
    """time.monotonic_ns of the test."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now
