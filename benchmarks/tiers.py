"""Host memory and disk below the KV cache: what they bring, what they cost, and what the simulator says of them.

python benchmarks/tiers.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("tiers", __doc__)
