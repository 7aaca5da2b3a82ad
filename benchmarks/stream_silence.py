#!/usr/bin/env python3
"""What the client of a stream waits for while long prompts are computed: its first byte, and the longest silence.

A server of a model with random weights (its speed is that of its shape) gets four long prompts at once, one for each
route that streams, and has room for two of them: two are computed, two wait. Every byte is read from a plain socket,
with the time at which it came. The server's timeline says when a worker began with each prompt.

    python benchmarks/stream_silence.py [--tokens 12000] [--shape smollm2-135m] [--json stream_silence.json]
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import report
from servers import PROGRAM, URL, Server

SCRIPTS = Path(__file__).parent.parent / "scripts"
NUM_OUTPUT = 8
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
IDLE = (b": keep-alive", b"event: ping")


@dataclass
class Reading:
    """One stream as it came. times: of every piece, the head first; request_id: as the server calls it."""

    route: str
    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)
    data: bytes = b""
    request_id: str = ""

    def read(self, body: bytes) -> None:
        """Ask, and read to the end."""
        parts = urlsplit(URL)
        assert parts.hostname and parts.port
        head = (
            f"POST {self.route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            self.sent_s = time.monotonic()
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while data := connection.recv(1 << 16):
                self.times.append(time.monotonic())
                self.data += data
        if not self.data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{self.route}: {self.data[-500:].decode()}")
        lines = self.data.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
        self.request_id = dict(line.split(": ", 1) for line in lines[1:])["x-request-id"]

    def row(self, admitted_s: float) -> dict[str, Any]:
        """admitted_s: when a worker began with the prompt."""
        text = self.data.rpartition(b"\r\n\r\n")[0]
        first_byte_s = self.times[0]
        return {
            "route": self.route,
            "admitted_s": admitted_s - self.sent_s,
            "first_byte_s": first_byte_s - self.sent_s,
            "first_byte_after_admission_s": max(0.0, first_byte_s - admitted_s),
            "longest_silence_s": max(after - before for before, after in pairwise(self.times)),
            "fillers": sum(text.count(filler) for filler in IDLE),
            "total_s": self.times[-1] - self.sent_s,
        }


def body_of(route: str, num_tokens: int, model: str) -> bytes:
    """A request with a prompt of about so many tokens, unlike those of the other routes."""
    words = f"{route[4:]} " + "x " * num_tokens
    said = [{"role": "user", "content": words}]
    fields: dict[str, Any] = {"model": model, "stream": True, "max_tokens": NUM_OUTPUT}
    if route == "/v1/completions":
        fields |= {"prompt": words}
    elif route == "/v1/responses":
        fields = {"model": model, "stream": True, "max_output_tokens": NUM_OUTPUT, "input": words}
    else:
        fields |= {"messages": said}
    return json.dumps(fields).encode()


def make_model(folder: Path, shape: str, context: int) -> None:
    """A model of this shape with random weights that takes prompts of this length."""
    subprocess.run([sys.executable, SCRIPTS / "make_random_model.py", shape, folder], check=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))


def admissions() -> dict[str, float]:
    """When a worker began with each request."""
    with urllib.request.urlopen(f"{URL}/timeline/records?since=0&limit=2000") as reply:
        records = json.load(reply)["records"]
    admitted = [record for record in records if record["kind"] == "request" and record["what"] == "admitted"]
    return {record["request_id"]: record["time_ns"] / 1e9 for record in reversed(admitted)}


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_000, help="of each prompt")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--json", help="write the result here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model", given.shape, 2 * given.tokens)
        command = [PROGRAM, "serve", "--model", f"{directory}/model", "--port", str(urlsplit(URL).port)]
        with Server([*command, "--served-model-name", "m", "--max-num-seqs", "2"], ready="/ready"):
            readings = [Reading(route) for route in ROUTES]
            bodies = [body_of(route, given.tokens, "m") for route in ROUTES]
            with ThreadPoolExecutor(len(ROUTES)) as pool:
                list(pool.map(Reading.read, readings, bodies))
            admitted = admissions()
    rows = [reading.row(admitted[reading.request_id]) for reading in readings]
    report("stream_silence", rows, given.json, num_prompt_tokens=given.tokens, shape=given.shape)


if __name__ == "__main__":
    main()
