"""Two hosts on one machine: ``unshare --user --map-root-user --net --mount python two_hosts.py DIRECTORY``.

This network namespace is the host "near" (10.77.0.1: front end and prefill worker), another is "far" (10.77.0.2: decode
worker, with a /dev/shm and a host name of its own). Prints what was seen as JSON. Taking a link down is a partition.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

CLI = (sys.executable, "-c", "from diptych.cli.main import main; main()")
NEAR, FAR, PORT, HTTP = "10.77.0.1", "10.77.0.2", 7000, 8000
FAR_HOST = 'hostname far; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")


def why_not() -> str:
    """Why there cannot be two hosts here; "" when there can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    attempt = "mount -t tmpfs tmpfs /run && ip netns add far && ip link add near type veth peer name far netns far"
    tried = subprocess.run([*UNSHARE, "sh", "-c", attempt], capture_output=True, text=True)
    return f"network namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def make_hosts() -> None:
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "netns", "add", "far")
    run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", "far")
    run("ip", "addr", "add", f"{NEAR}/24", "dev", "near")
    run("ip", "link", "set", "near", "up")
    for command in (f"addr add {FAR}/24 dev far", "link set far up", "link set lo up"):
        run("ip", "-n", "far", *command.split())


def get(path: str) -> str:
    with urlopen(f"http://{NEAR}:{HTTP}{path}", timeout=20) as reply:
        return str(reply.read().decode())


def ask(number: int) -> str:
    prompt = f"def function_{number}(first, second):\n    " + "value = compute(first)\n    " * 20
    body = {"model": "stdlib-python", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    request = Request(
        f"http://{NEAR}:{HTTP}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def metric(name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in get("/metrics").splitlines() if line.startswith(name))


def until(condition: Any, timeout_s: float = 90.0) -> float:
    """How long it took."""
    begin = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - begin
        except OSError:
            pass
        assert time.monotonic() - begin < timeout_s, "it never happened"
        time.sleep(0.05)


def start(processes: list[subprocess.Popen[bytes]], log: Path, *command: str) -> None:
    processes.append(subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT))


def main() -> None:
    directory = Path(sys.argv[1])
    key = directory / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    make_hosts()
    worker = (*CLI, "worker", "--join", f"{NEAR}:{PORT}", "--key-file", str(key), "--kv-cache-memory", "100MiB")
    processes: list[subprocess.Popen[bytes]] = []
    seen: dict[str, Any] = {}
    try:
        start(processes, directory / "front.log", *CLI, "serve", "--both", "0", "--host", NEAR, "--port", str(HTTP),
              "--listen-workers", f"{NEAR}:{PORT}", "--key-file", str(key), "--disaggregate", "always",
              "--heartbeat-timeout", "3")  # fmt: skip
        start(processes, directory / "near.log", *worker, "--role", "prefill", "--host-name", "near")
        start(processes, directory / "far.log", "ip", "netns", "exec", "far", "unshare", "-mu", "sh", "-c", FAR_HOST,
              "far", *worker, "--role", "decode")  # fmt: skip
        serve(seen)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)
    print(json.dumps(seen))


def serve(seen: dict[str, Any]) -> None:
    until(lambda: metric("diptych:worker_up") == 2)
    seen["answers"] = [ask(number) for number in range(6)]
    seen["handoffs"] = metric("diptych:handoffs_total")
    seen["bytes"] = metric("diptych:kv_transfer_bytes_total")
    run("ip", "link", "set", "near", "down")
    seen["noticed_s"] = until(lambda: metric("diptych:worker_up") == 1, 20)
    seen["alone"] = [ask(number) for number in range(6)]
    run("ip", "link", "set", "near", "up")
    until(lambda: metric("diptych:worker_up") == 2, 30)
    seen["again"] = [ask(number) for number in range(6)]
    seen["more_handoffs"] = metric("diptych:handoffs_total") - seen["handoffs"]


if __name__ == "__main__":
    main()
