"""Host memory and disk below the KV cache: what they bring, what they cost, and whether faults of a disk do harm.

python benchmarks/tiers.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("tiers", __doc__)
