"""What comes from others is shown on a terminal and not obeyed."""

import unicodedata

from diptych.base.terminal_text import shown


def test_no_control_character_and_no_turn_of_direction_is_printed() -> None:
    turns = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for number in range(0x110000):
        character = chr(number)
        is_control = unicodedata.category(character) == "Cc" or unicodedata.bidirectional(character) in turns
        if is_control and character not in "\n\t":
            assert shown(character).isascii() and shown(character).isprintable(), hex(number)
    assert shown("\x1b]0;title\x07") == "\\x1b]0;title\\x07"
    assert shown("plain, ä 漢 😀\n\tline") == "plain, ä 漢 😀\n\tline"
