"""Text of others on a terminal: shown, not obeyed."""

_ENDS_AND_TABS = (0x09, 0x0A)
_CONTROLS = [*(code for code in range(0x20) if code not in _ENDS_AND_TABS), *range(0x7F, 0xA0)]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _DIRECTIONS}


def shown(text: str) -> str:
    """The text with control characters, and those that turn the direction of writing, as escapes. Line ends and tabs
    stay; what is shown of two texts together is what is shown of each."""
    return text.translate(_SHOWN)
