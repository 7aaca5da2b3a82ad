#!/usr/bin/env bash
# transformers reads layer_rope_theta of Muse Glimmer as a switch: which layers rotate, not by what base.
#
# Its documentation says that the list has the base of each layer and overrides the one of rope_parameters, 0 meaning no
# rotation. Two models that differ in nothing but the bases in the list give the same logits; one with another rope_theta
# in rope_parameters, or with a 0 at another layer, does not. Who reads such a file as documented computes something else
# than the library that wrote it, without an error on either side.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 torch==2.13.0
cat > compare.py <<'PY'
import torch
import transformers
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

transformers.logging.set_verbosity_error()


def states(thetas, theta=10000.0):
    config = MuseGlimmerTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, sliding_window=64, layer_rope_theta=thetas,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    torch.manual_seed(0)
    model = MuseGlimmerTextModel(config).eval()
    with torch.no_grad():
        return model(torch.arange(48)[None] % 60 + 3).last_hidden_state


usual = states([10000.0, 10000.0, 10000.0, 0])
other_bases = states([500.0, 1000000.0, 70.0, 0])
other_global = states([10000.0, 10000.0, 10000.0, 0], theta=1000000.0)
other_zero = states([0, 10000.0, 10000.0, 10000.0])
print("transformers", transformers.__version__)
for name, found in (
    ("other bases in layer_rope_theta", other_bases),
    ("another rope_theta in rope_parameters", other_global),
    ("the 0 at another layer", other_zero),
):
    print(f"{name}: hidden states differ by {(found - usual).abs().max().item():.2g}")
assert torch.equal(other_bases, usual)
assert not torch.equal(other_global, usual)
assert not torch.equal(other_zero, usual)
PY
HF_HUB_OFFLINE=1 venv/bin/python compare.py 2>/dev/null
