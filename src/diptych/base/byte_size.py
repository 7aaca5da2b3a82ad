"""How many bytes a text has, and a number of bytes in words."""


def size_words(num_bytes: int) -> str:
    """``2 GiB``, ``16.5 MiB``, ``512 KiB``; below that ``100 bytes``."""
    for unit, words in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {words}"
    return f"{num_bytes} bytes"


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8. Half of a surrogate pair, which UTF-8 cannot write, counts as the three that it would
    be written in."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
