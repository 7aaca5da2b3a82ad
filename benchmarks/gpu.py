#!/usr/bin/env python3
"""What the engine does on this GPU, measured in one command that ends within nine minutes.

    python benchmarks/gpu.py [PART ...] [--within 540] [--json gpu.json]

Each part is a process of its own, so that one that fails loses nothing of the others; it says beforehand how many
seconds it takes at most, and writes its rows when it ends. A part that no longer fits into the time, and one that
failed, is named in the table with the reason. Compiled kernels are kept in build/gpu-cache, for the next call.

The machine needs a GPU, Python 3.12 or another with torch for CUDA, Triton and transformers. What else Diptych imports
may be missing there: ``scripts/gpu-wheels`` fills build/gpu-wheels beforehand, where there is a network, and this
command uses what lies there. See docs/gpu.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, PACKAGES, SITE, CACHE = (
    ROOT / "build" / name for name in ("gpu-wheels", "gpu-packages", "gpu-site", "gpu-cache")
)
PARTS = {  # in the order of what is worth most if time runs out; seconds at most
    "ceilings": 30,
    "tests": 110,
    "rows": 60,
    "engine": 180,
    "steps": 45,
    "sampling": 40,
    "phases": 75,
}


def unpack_wheels() -> None:
    """Lay out what build/gpu-wheels holds. Wheels are archives; none of these has a step after unpacking."""
    for folder in (PACKAGES, SITE):
        folder.mkdir(parents=True, exist_ok=True)
    # behind what the machine has: PYTHONPATH would come before it
    (SITE / "sitecustomize.py").write_text(f"import sys\n\nsys.path.append({str(PACKAGES)!r})\n")
    for wheel in sorted(WHEELS.glob("*.whl")):
        mark = PACKAGES / f"{wheel.name}.unpacked"
        if not mark.exists():
            zipfile.ZipFile(wheel).extractall(PACKAGES)
            mark.touch()


def environment() -> dict[str, str]:
    """Variables of a part's process."""
    paths = [str(ROOT / "src"), str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
        "DIPTYCH_COMPILE": "0",
    }


def run_part(name: str, seconds: float) -> dict[str, Any]:
    """Rows of a part, or why there are none."""
    started = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.gpu_parts.{name}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=seconds, check=False
        )
        said, code = done.stdout, done.returncode
        reason = "" if code == 0 else f"ended with code {code}"
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
        reason = f"did not end within {seconds:.0f} s"
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {"part": name, "seconds": round(time.monotonic() - started, 1), "reason": reason, "rows": rows}


def card() -> dict[str, Any]:
    """The GPU and what drives it."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit.stdout.strip(),
        "when": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }


def show(results: list[dict[str, Any]]) -> None:
    """One line for each row."""
    for result in results:
        print(f"\n## {result['part']} ({result['seconds']} s)" + (f": {result['reason']}" if result["reason"] else ""))
        for row in result["rows"]:
            print("  " + ", ".join(f"{name} {value}" for name, value in row.items()))


def main() -> int:
    """Run the parts that were named, or all."""
    listed = "".join(f"  {name:9} at most {seconds} s\n" for name, seconds in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--within", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--json", type=Path, help="where the record is written, and written again after each part")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        sys.exit(f"gpu has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    unpack_wheels()
    end = time.monotonic() + options.within
    record: dict[str, Any] = {"benchmark": "gpu", "machine": card(), "parts": []}
    for name in options.parts or PARTS:
        seconds, left = PARTS[name], end - time.monotonic()
        if left < min(seconds, 30):
            result = {"part": name, "seconds": 0.0, "reason": f"no time was left ({left:.0f} s)", "rows": []}
        else:
            print(f"{name}: at most {min(seconds, left):.0f} s", file=sys.stderr, flush=True)
            result = run_part(name, min(seconds, left))
        record["parts"].append(result)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    show(record["parts"])
    return 1 if any(result["reason"] for result in record["parts"]) else 0


if __name__ == "__main__":
    sys.exit(main())
