"""KV from worker to worker, and workers on other hosts: speed, what a link hides, codecs, encryption, partitions.

python benchmarks/transfer.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("transfer", __doc__)
