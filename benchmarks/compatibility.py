"""Does Diptych read what is published as its makers do? Chat templates, configs, tokenizers, tool schemas.

    python benchmarks/compatibility.py PART [--folder FOLDER] [--limit N] [--json compatibility-PART.json]

Each part prints a table and what differs. FOLDER keeps the packages that a part downloads, so that a second run needs
no network; without it they are fetched into a temporary folder.
"""

from common import run_part

if __name__ == "__main__":
    run_part("compatibility", __doc__)
