"""Do published clients and agents work with the server, unchanged?

python benchmarks/clients.py calls|agents --folder FOLDER [...]
"""

from common import run_part

if __name__ == "__main__":
    run_part("clients", __doc__)
