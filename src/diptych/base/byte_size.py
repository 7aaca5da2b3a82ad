"""A number of bytes in words, for messages."""


def size_words(num_bytes: int) -> str:
    """``2 GiB``, ``16.5 MiB``, ``512 KiB``; below that ``100 bytes``."""
    for unit, words in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {words}"
    return f"{num_bytes} bytes"
