"""The bundled model with a chat template that takes tools, in the format that Hermes and Qwen write."""

import json
from pathlib import Path

from diptych.serving.link.engine_options import BUNDLED_MODEL

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif -%}
"""


def tool_model(directory: Path) -> Path:
    """The model in this new directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in Path(BUNDLED_MODEL).iterdir():
        if file.name != "tokenizer_config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((Path(BUNDLED_MODEL) / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    return directory
