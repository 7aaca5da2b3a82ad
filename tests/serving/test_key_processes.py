"""Servers with a file of keys, as processes: who gets what at each of their routes, and where no key may be seen."""

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from app_routes import calls_of, front_app, is_open, server_app
from servers import CLI, running

from diptych.serving import edge_limits
from diptych.web.guide_app import guide_app
from diptych.web.panel_host import PanelHost

pytestmark = pytest.mark.system
MARKER = f"sk-marker-{secrets.token_hex(8)}"  # other tests run beside this one
TEXT = "what-the-client-has-said"  # prompts are as secret as keys, but to their own client
FAKE_ENGINE = Path(__file__).parent / "front" / "fake_engine.py"
ENDLESS = ("/timeline",)


def key_of(name: str) -> str:
    return f"{MARKER}-{name}"


@dataclass
class KeyedServer:
    """A server with the keys "web", "op" (an admin's) and, hashed, "late". written: files that it writes."""

    http: httpx.Client
    written: list[Path]
    seen: list[str] = field(default_factory=list)  # all replies

    def ask(self, method: str, path: str, key: str = "", **more: Any) -> int:
        """The status of a reply, which is read to its end, or, of one that has none, to its first event."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with self.http.stream(method, path, headers=headers, **more) as reply:
            if path in ENDLESS and reply.status_code == 200:
                body = next(reply.iter_text(), "") if method == "GET" else ""
            else:
                body = reply.read().decode("utf-8", "replace")
            self.seen.append(f"{reply.headers}\n{body}")
            return reply.status_code


def options(folder: Path) -> tuple[list[str], list[Path]]:
    """Options of a server whose every output goes to a file, and these files."""
    entries = [("web", "key", key_of("web"), ""), ("op", "key", key_of("op"), "admin = true\n")]
    entries.append(("late", "sha256", sha256(key_of("late").encode()).hexdigest(), ""))
    keys, access, record = folder / "keys.toml", folder / "access.jsonl", folder / "record.jsonl"
    keys.write_text("".join(f'[[key]]\nname = "{name}"\n{kind} = "{key}"\n{more}' for name, kind, key, more in entries))
    keys.chmod(0o600)
    common = ["--api-keys", str(keys), "--access-log", str(access), "--record", str(record), "--port", "0"]
    return [*common, "--log-level", "debug"], [access, record]


@contextmanager
def served(folder: Path) -> Iterator[KeyedServer]:
    """``diptych serve``, with all that it keeps in files."""
    given, written = options(folder)
    kept = ("--responses", str(folder / "responses.db"), "--batch-dir", str(folder / "batches"))
    kept += ("--survive-restart", str(folder / "streams"), "--threads", "1", "--kv-cache-memory", "64MiB")
    log = folder / "stderr"
    with running((*CLI, "serve", *given, *kept), log) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            yield KeyedServer(http, [log, *written])
        server.terminate()


@contextmanager
def fronted(folder: Path) -> Iterator[KeyedServer]:
    """``diptych front`` over an engine that asks for a key, too."""
    given, written = options(folder)
    (folder / "engine-key").write_text(key_of("engine"))
    (folder / "engine-key").chmod(0o600)
    command = (sys.executable, str(FAKE_ENGINE), "vllm", "0")
    with ExitStack() as stack:
        engine = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(engine.kill)
        assert engine.stdout is not None
        found = re.search(r"http://\S+", engine.stdout.readline())
        assert found is not None
        spec = f"vllm={found[0]},api_key_file={folder / 'engine-key'}"
        log = folder / "stderr"
        with running((*CLI, "front", "--engine", spec, *given), log) as server:
            with httpx.Client(base_url=server.url, timeout=60) as http:
                yield KeyedServer(http, [log, *written])
            server.terminate()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}


@pytest.mark.parametrize(("start", "build"), [(served, server_app), (fronted, front_app)], ids=["serve", "front"])
def test_every_route_asks_a_process_for_its_key_and_no_key_is_seen_anywhere(
    start: Any, build: Any, tmp_path: Path
) -> None:
    calls = [(method, quickly(path)) for method, path in calls_of(build(api_keys=("x",), admin_key="x"))]
    assert len(calls) > 20
    with start(tmp_path) as server:
        for method, path in calls:
            keys = {"none": "", "unknown": "sk-unknown"} if is_open(path) else WRONG
            found = {server.ask(method, path, key) for key in keys.values()}
            assert found == {401} if not is_open(path) else not found & {401, 403, 500}, (method, path, found)
        for method, path in [call for call in calls if not is_open(call[1])]:
            for name in ("web", "late"):
                status = server.ask(method, path, key_of(name))
                assert (status == 403) == path.startswith("/admin/"), (method, path, name, status)
                assert status not in (401, 500), (method, path, name, status)
        assert {server.ask("GET", path, key_of("op")) for path in ("/admin/workers", "/admin/keys")} == {200}
        for path, body in BODIES.items():
            assert [server.ask("POST", path, key_of(name), json=body) for name in ("web", "late", "op")] == [200] * 3
            assert [server.ask("POST", path, key, json=body) for key in WRONG.values()] == [401] * len(WRONG)
        before = len(server.seen)
        assert [server.ask("GET", "/metrics", key_of(name)) for name in ("web", "op")] == [200, 200]
        assert all('="web"' in text for text in server.seen[before:]), "the use of names is shown"
        server.seen += arguments_of_all_processes()
    assert all(path.exists() for path in server.written)
    server.seen += [path.read_text("utf-8", "replace") for path in server.written]
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.name not in ("keys.toml", "engine-key"):
            server.seen.append(file.read_bytes().decode("latin-1"))
    shown = [text for text in server.seen if MARKER in text or sha256(key_of("web").encode()).hexdigest() in text]
    assert not shown, shown[0][:2000]
    assert len(json.loads(server.written[1].read_text().splitlines()[0])) > 5


def quickly(path: str) -> str:
    """The path of a request that computes nothing once it is let in."""
    return f"{path}?{'a' * (edge_limits.GUIDE_QUERY_BYTES + 1)}" if path.startswith("/guide/api/") else path


WRONG = {"none": "", "unknown": "sk-another-key-0123456789", "cut": key_of("web")[:-1], "longer": key_of("web") + "x"}


def arguments_of_all_processes() -> list[str]:
    """As every user of this machine can read them."""
    found = []
    for process in psutil.process_iter():
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:  # it has ended, or is another user's
            continue
    assert any("diptych" in text for text in found)
    return found


def test_the_guide_has_no_route_that_knows_or_changes_anything_of_a_server() -> None:
    host = PanelHost()
    try:
        calls = calls_of(guide_app(host))
    finally:
        host.close()
    assert {"/guide", "/compare"} <= {path for _, path in calls} and len(calls) > 10
    assert {method for method, _ in calls} <= {"GET", "HEAD"}
    assert all(re.fullmatch(r"/|/(guide|compare|static)(/.*)?", path) for _, path in calls)


def test_the_guide_as_a_process_is_open_knows_no_key_and_has_no_route_of_a_server(tmp_path: Path) -> None:
    """A key that a browser sends along, since another server of this machine asks for one, changes nothing."""
    host = PanelHost()
    try:
        own = calls_of(guide_app(host))
    finally:
        host.close()
    log = tmp_path / "stderr"
    with running((*CLI, "guide", "--port", "0"), log) as process:
        with httpx.Client(base_url="http://{}:{}".format(*process.address), timeout=60) as http:
            server = KeyedServer(http, [log])
            for method, path in own:
                found = {server.ask(method, quickly(path), key) for key in ("", "sk-unknown", key_of("web"))}
                assert len(found) == 1 and not found & {401, 403, 500, 503}, (method, path, found)
            foreign = {call for build in (server_app, front_app) for call in calls_of(build())} - set(own)
            known = {path for _, path in own}
            for method, path in sorted(foreign):
                if path not in known and not path.startswith("/static"):
                    assert server.ask(method, path, key_of("op"), json={}) == 404, (method, path)
        process.terminate()
    shown = [text for text in (*server.seen, log.read_text()) if MARKER in text]
    assert not shown, shown[0][:2000]
