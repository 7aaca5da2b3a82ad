#!/usr/bin/env bash
# huggingface_hub 2.4 begins a download into its cache anew where an earlier call was cut, and checks no digest.
#
# Release 1.5 still left <etag>.incomplete in the cache, and the next call asked for the rest of it. Now each call writes to
# a file of its own, which is removed when the call ends: only retries within one call go on, and these from the last
# whole 10 MB. The digest by which the file is named in the cache, and which the Hub sends as its ETag, is not compared
# with what came: other bytes of the same number are a file of the cache like any other. A program that wants either must
# do it itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet huggingface_hub==2.4.0
cat > cut.py <<'PY'
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK, CUT = 10 * 2**20, 12 * 2**20
DATA = bytes(range(256)) * (16 * 2**20 // 256)
NAME = hashlib.sha256(DATA).hexdigest()
ranges, state = [], {"cut": True, "content": DATA}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *values):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        if not self.path.startswith("/org/model/resolve/"):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        data = state["content"][begin:]
        self.send_response(206 if begin else 200)
        for key, value in {"ETag": f'"{NAME}"', "X-Repo-Commit": "a" * 40, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            ranges.append(begin)
            self.wfile.write(data[:CUT] if state["cut"] and begin == 0 else b"" if state["cut"] else data)
        self.close_connection = state["cut"]


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import huggingface_hub  # reads HF_ENDPOINT when it is imported

print("huggingface_hub", huggingface_hub.__version__)
ask = {"repo_id": "org/model", "filename": "model.safetensors", "cache_dir": "cache"}
try:
    huggingface_hub.hf_hub_download(**ask)
except Exception as error:
    print("the first call ends with", type(error).__name__, "and asked from byte", ranges)
within, ranges[:] = list(ranges), []
state["cut"] = False
huggingface_hub.hf_hub_download(**ask)
print("the second call asks from byte", ranges)
state["content"] = bytes(len(DATA))
path = huggingface_hub.hf_hub_download(**ask | {"cache_dir": "other"})
found = hashlib.sha256(open(path, "rb").read()).hexdigest()
print("other bytes are taken, as", os.path.basename(os.path.realpath(path))[:12], "though their digest is", found[:12])

assert within[0] == 0 and within[1:] and all(begin == CHUNK for begin in within[1:])  # retries go on
assert ranges == [0]  # a new call does not
assert os.path.basename(os.path.realpath(path)) == NAME != found
PY
venv/bin/python cut.py 2>/dev/null
