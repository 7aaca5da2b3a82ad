"""Is ``diptych bench`` right, and what does it cost?

python benchmarks/bench.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("bench", __doc__)
