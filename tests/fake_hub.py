"""A Hub on this machine: an HTTP server with the endpoints that the Hub's client library asks, and made-up files.

Small files are served by the Hub itself, large ones (LFS) after a redirect, as the real one does.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin", "tokenizer.json")


@dataclass
class FakeRepo:
    """A model. revisions: files by name, by branch or tag. cuts: after how many bytes replies break off, by the name of
    the file, each once. changed: files that come with other bytes than their digest. is_gated: a token is needed."""

    revisions: dict[str, dict[str, bytes]]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    without_digest: set[str] = field(default_factory=set)
    is_gated: bool = False
    ignores_ranges: bool = False

    def commit(self, revision: str) -> str | None:
        commits = {name: commit_of(files) for name, files in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for files in self.revisions.values() if commit_of(files) == commit)


def commit_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(
        repr(sorted((name, digest_of(name, data)) for name, data in files.items())).encode()
    ).hexdigest()


def digest_of(name: str, data: bytes) -> str:
    if name.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class FakeHub:
    """repos: by name. asked: method, path, and the range and authorization headers of every request, in their order."""

    url: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)

    def bytes_of(self, name: str) -> list[tuple[str, str]]:
        """(path, range) of each request for the content of files of this name."""
        return [(path, span) for method, path, span, _ in self.asked if method == "GET" and path.endswith(name)]


@contextmanager
def fake_hub(**repos: FakeRepo) -> Iterator[FakeHub]:
    """Serve these repositories, of the organisation "org" where their name has none."""
    hub = FakeHub(repos={name if "/" in name else f"org/{name}": repo for name, repo in repos.items()})

    class Handler(_Handler):
        served = hub

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have left, as those do whose disk is full."""


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        span, key = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        self.served.asked.append((self.command, path, span, key))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            revision = "/".join(rest[1:]) if rest[:1] == ["revision"] else "main"
            self._info(name, revision)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), is_redirected=False)
        elif len(parts) > 4 and parts[0] == "lfs":
            self._file("/".join(parts[1:3]), parts[3], "/".join(parts[4:]), is_redirected=True)
        else:
            self._error(404, "EntryNotFound")

    def _repo(self, name: str, revision: str) -> tuple[FakeRepo, str] | None:
        repo = self.served.repos.get(name)
        if repo is None:
            self._error(404, "RepoNotFound")
            return None
        if repo.is_gated and not self.headers.get("Authorization") and not self.path.startswith("/lfs/"):
            self._error(403, "GatedRepo")
            return None
        commit = repo.commit(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
            return None
        return repo, commit

    def _info(self, name: str, revision: str) -> None:
        if (found := self._repo(name, revision)) is None:
            return
        repo, commit = found
        siblings = []
        for file, data in repo.files(commit).items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": "0" * 40}
            if file.endswith(LFS):
                entry["lfs"] = {"sha256": digest_of(file, data), "size": len(data), "pointerSize": 130}
            else:
                entry["blobId"] = digest_of(file, data)
            if file in repo.without_digest:
                entry |= {"blobId": None, "lfs": None}
            siblings.append(entry)
        self._send(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

    def _file(self, name: str, revision: str, file: str, *, is_redirected: bool) -> None:
        if (found := self._repo(name, revision)) is None:
            return
        repo, commit = found
        data = repo.files(commit).get(file)
        if data is None:
            self._error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest_of(file, data)}"', "Accept-Ranges": "bytes"}
        if file.endswith(LFS) and not is_redirected:
            headers |= {"X-Linked-Etag": f'"{digest_of(file, data)}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = f"{self.served.url}/lfs/{name}/{commit}/{file}"
            self._send(302, b"", headers)
            return
        if file in repo.changed:
            data = bytes(len(data))
        start = 0
        if (span := self.headers.get("Range", "")) and not repo.ignores_ranges:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cuts = repo.cuts.get(file, [])
        cut = cuts.pop(0) if self.command == "GET" and cuts else None
        self._send(206 if start else 200, data[start:], headers, cut)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.close_connection = True
