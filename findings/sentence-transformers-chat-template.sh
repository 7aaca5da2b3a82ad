#!/usr/bin/env bash
# Sentence Transformers 6 embeds plain texts as chat messages, where the model's tokenizer has a chat template.
#
# encode("a b c") of a decoder made into an embedder (Transformer and Pooling, nothing else said) does not embed the tokens
# of "a b c": the text becomes a user's message, the prompt a system message, and the template's tokens are embedded with
# them. save() writes that into sentence_bert_config.json (modality_config has "message"), so that it holds for every
# reader of the folder; a folder of version 5, whose file has no modality_config, gets the plain tokens of the same model.
# A server that reads only the pooling of such a folder gives other vectors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0
cat > embed.py <<'PY'
import json
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import sentence_transformers
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.logging.set_verbosity_error()
words = ["<unk>", "<system>", "<user>", "a", "b", "c", "find"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(["<system>", "<user>"])
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")
fast.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
config = transformers.Qwen3Config(
    vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
)
transformers.Qwen3ForCausalLM(config).save_pretrained("base")
fast.save_pretrained("base")


def tokens(model, **prompt):
    return [words[token] for token in model.preprocess(["a b c"], **prompt)["input_ids"][0].tolist()]


first = Transformer("base")
model = SentenceTransformer(modules=[first, Pooling(16, pooling_mode="mean")], device="cpu")
model.save("saved")
said = json.loads(Path("saved/sentence_bert_config.json").read_text())
reloaded = SentenceTransformer("saved", device="cpu")
Path("saved/sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
older = SentenceTransformer("saved", device="cpu")
print("sentence-transformers", sentence_transformers.__version__, "transformers", transformers.__version__)
print("the tokenizer:          ", fast.tokenize("a b c"))
print("encode() as saved by 6: ", tokens(reloaded))
print("  with a prompt:        ", tokens(reloaded, prompt="find"))
print("  modality_config:      ", sorted(said["modality_config"]))
print("encode() as saved by 5: ", tokens(older))
assert tokens(model) == tokens(reloaded) == ["<user>", "a", "b", "c"]
assert tokens(reloaded, prompt="find") == ["<system>", "find", "<user>", "a", "b", "c"]
assert sorted(said["modality_config"]) == ["message", "text"]
assert tokens(older) == fast.tokenize("a b c") == ["a", "b", "c"]
PY
HF_HUB_OFFLINE=1 venv/bin/python embed.py 2>/dev/null
