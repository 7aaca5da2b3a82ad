"""Servers over HTTP, in turns with vLLM's CPU build and llama.cpp: latencies under load, and what a handoff costs.

    python benchmarks/serving.py PART MODEL_DIR [...]

scripts/bench-peers installs the peers, and says which options name them.
"""

from common import run_part

if __name__ == "__main__":
    run_part("serving", __doc__)
