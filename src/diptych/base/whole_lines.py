"""JSON in lines, for readers that know more ends of a line than LF and CR."""

_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def with_whole_lines(data: bytes) -> bytes:
    """Lines of JSON, or server-sent events, with U+0085, U+2028 and U+2029 as escapes. JSON takes these characters as
    they are, and only LF and CR end a line in either; but Python's ``str.splitlines`` knows them, and clients that read
    lines of text cut the JSON there."""
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return data
