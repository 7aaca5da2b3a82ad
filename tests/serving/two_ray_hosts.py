"""A Ray cluster of two hosts, of which one loses its power:
``unshare --user --map-root-user --net --mount python two_ray_hosts.py DIRECTORY``.

Hosts are those of two_hosts.py, with a raylet each; the front end and Ray's head are on "near". Prints what was seen as
JSON. gap_s: the longest time without a token of each stream, from the loss of the host on.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from two_hosts import CLI, FAR, FAR_HOST, HTTP, NEAR, PORT, make_hosts, metric, run, start, until

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats")
RAY_PORT = 6379
NUM_STREAMS, NUM_TOKENS = 6, 600
READ_BEFORE = 20  # tokens of every stream, before the host is lost


class Stream(threading.Thread):
    """One client. ``times`` and ``text``: of the pieces that came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.times: list[float] = []
        self.text = ""
        self.error = ""
        self._number = number

    def run(self) -> None:
        """Ask, and read to the end."""
        prompt = f"def function_{self._number}(first, second):\n    "
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(NEAR, HTTP, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            while line := reply.readline():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except OSError as error:
            self.error = str(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        self.text += "".join(choice["text"] for choice in event["choices"])
        self.times.append(time.monotonic())

    def gap_s(self, since_s: float) -> float:
        """The longest time without a piece, from then on."""
        times = [since_s, *(at for at in self.times if at > since_s)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


def streams() -> list[Stream]:
    found = [Stream(number) for number in range(NUM_STREAMS)]
    for stream in found:
        stream.start()
    return found


def lose_power() -> int:
    """The far host is gone, with all that runs there, and nobody is told. How many processes that were."""
    run("ip", "link", "set", "near", "down")
    listed = subprocess.run(["ip", "netns", "pids", "far"], check=True, capture_output=True, text=True).stdout
    pids = [int(word) for word in listed.split()]
    for pid in pids:
        assert pid > 1, listed
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def serve(seen: dict[str, Any]) -> None:
    until(lambda: metric("diptych:worker_up") == 2, 180)
    undisturbed = streams()
    for stream in undisturbed:
        stream.join()
    disturbed = streams()
    until(lambda: all(len(stream.times) > READ_BEFORE for stream in disturbed))
    seen["killed"], lost_s = lose_power(), time.monotonic()
    seen["noticed_s"] = until(lambda: metric("diptych:worker_up") == 1, 30)
    for stream in disturbed:
        stream.join()
    seen["errors"] = [stream.error for stream in (*undisturbed, *disturbed) if stream.error]
    seen["same"] = [one.text == other.text for one, other in zip(undisturbed, disturbed, strict=True)]
    seen["retries"] = metric("diptych:request_retries_total")
    seen["unfinished"] = sum(stream.times[-1] > lost_s for stream in disturbed)
    seen["gap_s"] = [round(stream.gap_s(lost_s), 2) for stream in disturbed]


def main() -> None:
    directory = Path(sys.argv[1])
    key = directory / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    make_hosts()
    processes: list[subprocess.Popen[bytes]] = []
    seen: dict[str, Any] = {}
    try:
        start(processes, directory / "head.log", *RAY, "--head", f"--port={RAY_PORT}", f"--node-ip-address={NEAR}",
              "--include-dashboard=false", f"--temp-dir={directory / 'ray'}")  # fmt: skip
        time.sleep(8)  # for the head's first node
        start(processes, directory / "far.log", "ip", "netns", "exec", "far", "unshare", "-mu", "sh", "-c", FAR_HOST,
              "far", *RAY, f"--address={NEAR}:{RAY_PORT}", f"--node-ip-address={FAR}")  # fmt: skip
        time.sleep(5)
        start(processes, directory / "front.log", *CLI, "serve", "--both", "2", "--max-workers", "2", "--host", NEAR,
              "--port", str(HTTP), "--launcher", "ray", "--ray-address", f"{NEAR}:{RAY_PORT}",
              "--listen-workers", f"{NEAR}:{PORT}", "--key-file", str(key), "--heartbeat-timeout", "3",
              "--kv-cache-memory", "100MiB", "--routing", "round_robin")  # fmt: skip
        serve(seen)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
