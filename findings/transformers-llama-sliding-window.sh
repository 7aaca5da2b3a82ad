#!/usr/bin/env bash
# A Llama whose config.json has a sliding_window has two outputs in transformers 5: the model ignores it, its cache does not.
#
# LlamaForCausalLM has no windows, and its mask is that of full attention. DynamicCache makes its layers from the config,
# where any field called sliding_window is enough: each layer keeps the last tokens only. So the logits of a prompt depend
# on whether it is computed at once or token by token, and generate() is not what forward() says. use_sliding_window false
# (as in a Qwen2 that was converted to Llama's names) does not help: only classes that have the field look at it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 torch==2.13.0
cat > window.py <<'PY'
import torch
import transformers

print("transformers", transformers.__version__)
prompt = torch.arange(1, 33)[None]


@torch.no_grad()
def difference(**fields):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, **fields,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    whole = model(prompt).logits[0, -1]
    cache, kinds = None, set()
    for place in range(prompt.shape[1]):
        step = model(prompt[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        kinds = {type(layer).__name__ for layer in cache.layers}
    found = float((whole - step.logits[0, -1]).abs().max())
    print(f"{fields}: at once and with the cache the last logits differ by {found:.2g} ({', '.join(kinds)})")
    return found


assert difference() < 1e-4
assert difference(sliding_window=8) > 1e-2
assert difference(sliding_window=8, use_sliding_window=False) > 1e-2
PY
venv/bin/python window.py 2>/dev/null
