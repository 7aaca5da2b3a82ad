#!/usr/bin/env bash
# transformers never uses the long_factor of a Phi-MoE checkpoint, though it does use its long_mscale.
#
# LongRoPE has two sets of factors, for prompts up to original_max_position_embeddings and beyond. Phi3ForCausalLM takes
# the long ones from there on. PhimoeForCausalLM (Phi-3.5-MoE) has the same decorator on its rotary embedding, but its
# forward computes the frequencies anew from the config, without the length: what the decorator chose is dropped. Two
# models that differ in nothing but long_factor give the same logits for a prompt of three times the original context;
# with another long_mscale they do not. So whoever takes this library for the reference of a long prompt compares with a
# mixture of both: the short frequencies, and the long magnitude.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 torch==2.13.0
cat > compare.py <<'PY'
import torch
import transformers
from transformers import Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

transformers.logging.set_verbosity_error()
ORIGINAL, LENGTH, HALF = 32, 96, 4
SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}


def logits(config, model, long_factor, num_tokens, **more):
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "short_factor": [1.0] * HALF,
        "long_factor": [long_factor] * HALF, "original_max_position_embeddings": ORIGINAL, **more,
    }
    torch.manual_seed(0)
    made = model(config(**SHAPE, rope_parameters=rope)).eval()
    with torch.no_grad():
        return made(torch.arange(num_tokens)[None] % 60 + 3).logits


def moe(long_factor, num_tokens, long_mscale=1.2):
    return logits(PhimoeConfig, PhimoeForCausalLM, long_factor, num_tokens, short_mscale=1.1, long_mscale=long_mscale)


def dense(long_factor, num_tokens):
    return logits(Phi3Config, Phi3ForCausalLM, long_factor, num_tokens)


print("transformers", transformers.__version__)
for name, compute in (("Phi3ForCausalLM", dense), ("PhimoeForCausalLM", moe)):
    for num_tokens in (ORIGINAL // 2, LENGTH):
        difference = (compute(2.0, num_tokens) - compute(30.0, num_tokens)).abs().max().item()
        print(f"{name}, {num_tokens} tokens, long_factor 2 against 30: logits differ by {difference:.2g}")
by_mscale = (moe(2.0, LENGTH) - moe(2.0, LENGTH, long_mscale=1.5)).abs().max().item()
print(f"PhimoeForCausalLM, {LENGTH} tokens, long_mscale 1.2 against 1.5: logits differ by {by_mscale:.2g}")
assert torch.equal(dense(2.0, ORIGINAL // 2), dense(30.0, ORIGINAL // 2))
assert not torch.equal(dense(2.0, LENGTH), dense(30.0, LENGTH))
assert torch.equal(moe(2.0, LENGTH), moe(30.0, LENGTH))
assert by_mscale > 0
PY
HF_HUB_OFFLINE=1 venv/bin/python compare.py 2>/dev/null
