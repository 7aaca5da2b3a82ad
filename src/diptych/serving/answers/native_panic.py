"""Failures of native libraries. A library written in Rust that meets what it did not expect panics, and pyo3 raises
that as a PanicException, which derives from BaseException: ``except Exception`` lets it pass.

Each library has a PanicException of its own that cannot be imported, so it is known by its name.
"""


def is_panic(error: BaseException) -> bool:
    """Whether a native library panicked in the middle of a call."""
    return type(error).__name__ == "PanicException"


def is_failure(error: BaseException) -> bool:
    """Whether the call itself failed, by an exception or a panic; False for interrupts, cancellations and exits."""
    return isinstance(error, Exception) or is_panic(error)
