"""How right is the simulator? Published measurements, live servers and held-out points, each beside what it says.

    python benchmarks/twin.py check DATA      every published measurement that is reproduced, in one table
    python benchmarks/twin.py PART [...]      one part; PART --help says what it compares, and with what

DATA is a folder with the published measurements: each part names its sources. Records go to results/ with --json.
"""

from common import run_part

if __name__ == "__main__":
    run_part("twin", __doc__)
