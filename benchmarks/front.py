"""``diptych front`` over engines of others: what it costs, what it brings beside other routers, what faults do.

python benchmarks/front.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("front", __doc__)
