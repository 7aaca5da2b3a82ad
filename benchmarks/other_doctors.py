"""What published tools say of the server that benchmarks/diagnosis.py hurts: vllm-doctor and inferpilot, from PyPI.

Both read the same ``/metrics`` as ``diptych diagnose`` reads of vLLM. They name symptoms and regimes, not causes, so
each finding is taken for every cause that it could mean: a run counts as right when the first finding may mean the
injected cause, and a healthy run when nothing is found. They have no objectives; what they know by default is used.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OTHER_DOCTORS = ("vllm-doctor", "inferpilot")
WAITING = ("prefill_queueing", "sequence_limit", "capacity", "batch_flood")
KV = ("kv_cache_full", "too_few_decode_workers")
PREFIX = ("prefix_misses", "cold_cache")
MEANINGS: dict[str, tuple[str, ...]] = {
    # rules of vllm-doctor
    "kv_cache_pressure": KV,
    "preemption_pressure": KV,
    "queue_pressure": WAITING,
    "queue_latency": WAITING,
    "ttft_bottleneck": ("prefill_queueing", "capacity", "too_few_prefill_workers"),
    "tpot_bottleneck": ("prefill_interference", "decode_batch", "oversubscribed_cores", "capacity"),
    "prefix_cache_efficiency": PREFIX,
    # regimes of inferpilot
    "kv_capacity_bound_preempting": KV,
    "near_capacity": (*KV, "capacity"),
    "not_kv_bound": (*WAITING, "decode_batch", "prefill_interference", "oversubscribed_cores"),
}
HEALTHY = ("healthy_or_underutilized", "")


def other_findings(folder: Path, url: str, interval_s: float) -> dict[str, str]:
    """The first finding of each tool ("" for none) while the load runs. folder: a virtual environment that has them."""
    doctor = [str(folder / "bin" / "vllm-doctor"), "diagnose", f"{url}/metrics", "-o", "json"]
    pilot = [str(folder / "bin" / "inferpilot"), "doctor", "--url", url, "--interval", f"{interval_s:g}", "--json"]
    with ThreadPoolExecutor(2) as pool:
        said, regime = pool.map(_run, (doctor, pilot))
    checks = [check for check in said.get("checks", ()) if check["finding"]]
    checks.sort(key=lambda check: check["finding"]["severity"] != "critical")
    return dict(zip(OTHER_DOCTORS, (checks[0]["id"] if checks else "", str(regime.get("verdict", ""))), strict=True))


def is_right(finding: str, expected: tuple[str, ...]) -> bool:
    """Whether a finding may mean one of the expected causes; without any, whether it says that nothing is wrong."""
    if not expected:
        return finding in HEALTHY
    return bool(set(MEANINGS.get(finding, ())) & set(expected))


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False)
    text = done.stdout.decode()
    found: dict[str, Any] = json.loads(text[text.index("{") :]) if "{" in text else {}
    return found
