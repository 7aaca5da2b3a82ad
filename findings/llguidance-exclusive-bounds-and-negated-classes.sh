#!/usr/bin/env bash
# llguidance 1.9.1: two kinds of JSON schemas whose grammars allow values that are not valid.
#
# 1. {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5} allows 1: the exclusive bound is lost where it is an integer
#    and the other bound has the same integer part. With "maximum": 2 it is kept.
# 2. {"type": "string", "pattern": "^[^\"/]+$"} allows a text with a quotation mark (as \" in JSON), and "^[^\\\\]$" one of a
#    backslash: a negated class that leaves no control character out takes every escape. "^[^\\x00\"/]+$" is right.
#
# Expected: none of these values is allowed. Exits with 1 when llguidance behaves otherwise than written here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
from importlib import metadata

import llguidance

# a tokenizer of single bytes, with an end of sequence
vocabulary = {chr(byte) if 33 <= byte < 127 else f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": 256}
tokenizer = {
    "version": "1.0",
    "added_tokens": [{"id": 256, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "fuse_unk": False},
}
native = llguidance.LLTokenizer(json.dumps(tokenizer), eos_token=256)


def allows(schema, value):
    matcher = llguidance.LLMatcher(native, f"start: %json {json.dumps(schema)}\n", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(json.dumps(value).encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


seen = {
    "1 under exclusiveMinimum 1, maximum 1.5": allows({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, 1),
    "1 under exclusiveMinimum 1, maximum 2": allows({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, 1),
    "a quotation mark under ^[^\"/]+$": allows({"type": "string", "pattern": '^[^"/]+$'}, '"'),
    "a backslash under ^[^\\\\]$": allows({"type": "string", "pattern": "^[^\\\\]$"}, "\\"),
    "a quotation mark under ^[^\\x00\"/]+$": allows({"type": "string", "pattern": '^[^\\x00"/]+$'}, '"'),
}
print("llguidance", metadata.version("llguidance"))
for what, is_allowed in seen.items():
    print(f"{what}: {'allowed' if is_allowed else 'not allowed'}")
sys.exit(list(seen.values()) != [True, False, True, True, False])
PYTHON
