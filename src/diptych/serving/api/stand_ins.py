"""Texts that stand for what a model cannot read in the results of tools, and JSON without such content.

An agent looks at an image and goes on: refusing the result would refuse every later turn of its session, too.
"""

import json
from typing import Any

_UNREADABLE = ("image", "file", "document", "audio", "video")
_HIDDEN = ("encrypted_content", "encrypted_stdout", "encrypted_index", "signature", "cache_control", "citations")


def stand_in(kind: Any) -> str:
    """The text for a part of this type, such as ``input_image``."""
    noun = next((noun for noun in _UNREADABLE if noun in str(kind)), "content")
    return f"[{noun} left out: this model reads text only]"


def is_unreadable(kind: Any) -> bool:
    """Whether a part of this type holds an image, a file or the like."""
    return isinstance(kind, str) and any(noun in kind for noun in (*_UNREADABLE, "screenshot"))


def readable_json(value: Any) -> str:
    """JSON of a result without what only its server could read; images and files have their stand-ins."""
    return json.dumps(_readable(value), ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(element) for element in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "base64" and "data" in value:
        return stand_in(value.get("media_type"))
    return {name: _readable(element) for name, element in value.items() if name not in _HIDDEN}
