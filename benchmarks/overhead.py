"""What Diptych's own work costs, without a model: a scheduling decision, placing a request, a streamed token.

python benchmarks/overhead.py PART [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("overhead", __doc__)
