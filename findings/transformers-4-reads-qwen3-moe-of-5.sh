#!/usr/bin/env bash
# A Qwen3-MoE config that transformers 5 writes is another model to transformers 4.57: 128 experts and base 10,000.
#
# transformers 5 made num_experts an alias of num_local_experts for this family, and writes only the latter; the rotary
# base went into rope_parameters. 4.57 knows neither name: it keeps both as attributes that nothing reads, warns of
# nothing, and takes its defaults. The experts at least end in a mismatch of shapes when weights are loaded; the base
# does not (1,000,000 becomes 10,000): a dense Qwen3 that was saved again by 5 loads in 4.57, and answers with rotations
# that it was not trained with. Whoever reads config.json without this library has to know both spellings of both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for version in 4.57.3 5.24.0; do
    python3 -m venv "v$version"
    "v$version/bin/pip" install --quiet "transformers==$version"
done
cat > write.py <<'PY'
import json
import transformers
from transformers import Qwen3Config, Qwen3MoeConfig

rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
Qwen3MoeConfig(num_experts=60, rope_parameters=rope).save_pretrained("moe")
Qwen3Config(rope_parameters=rope).save_pretrained("dense")
written = json.load(open("moe/config.json"))
print(transformers.__version__, "writes", {name: written[name] for name in written if "expert" in name or "rope" in name})
assert "num_experts" not in written and written["num_local_experts"] == 60
assert "rope_theta" not in written
PY
cat > read.py <<'PY'
import transformers
from transformers import AutoConfig

moe, dense = AutoConfig.from_pretrained("moe"), AutoConfig.from_pretrained("dense")
print(transformers.__version__, "reads", moe.num_experts, "experts, base", moe.rope_theta, "and, dense, base", dense.rope_theta)
assert (moe.num_experts, moe.rope_theta, dense.rope_theta) == (128, 10000.0, 10000.0)
PY
export HF_HUB_OFFLINE=1
v5.24.0/bin/python write.py 2>/dev/null
v4.57.3/bin/python read.py 2>/dev/null
