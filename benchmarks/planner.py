"""How good is the planner? The simulated fleet that plans itself beside those that stay as they are.

python benchmarks/planner.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("planner", __doc__)
