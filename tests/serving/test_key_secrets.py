"""No key is shown by anything that a server prints, writes or answers."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import CLI, running

MARKER = "sk-marker-that-must-not-be-seen"
PATHS = (
    "/settings",
    "/metrics",
    "/timeline/records",
    "/version",
    "/ui/state",
    "/admin/keys",
    "/admin/workers",
    "/engines",
)


def answered(url: str, key: str) -> str:
    """The reply with its headers, whatever its status."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return f"{reply.headers}{reply.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.headers}{error.read().decode()}"


@pytest.mark.system
def test_no_output_of_a_server_has_a_key(tmp_path: Path) -> None:
    def key(name: str) -> str:
        return f"{MARKER}-{name}"

    file, admin = tmp_path / "keys.toml", tmp_path / "admin"
    file.write_text(f'[[key]]\nname = "op"\nkey = "{key("file")}"\nadmin = true\n')
    admin.write_text(key("admin"))
    for path in (file, admin):
        path.chmod(0o600)
    log, access = tmp_path / "stderr", tmp_path / "access.jsonl"
    record = tmp_path / "record.jsonl"
    options = (
        "--api-key", key("option"), "--api-keys", str(file), "--admin-key-file", str(admin),
        "--access-log", str(access),
        "--record", str(record), "--port", "0", "--log-level", "debug", "--threads", "1", "--kv-cache-memory", "64MiB",
    )  # fmt: skip
    with running((*CLI, "serve", *options), log) as server:
        seen = [
            answered(server.url + path, given)
            for given in (key("option"), key("file"), key("admin"), key("wrong"))
            for path in PATHS
        ]
        server.terminate()
    seen += [path.read_text() for path in (log, access, record) if path.exists()]
    assert "the key of --api-key can be read by every user of this machine" in log.read_text()
    assert any('"name":"op"' in text for text in seen) and "/settings" in access.read_text()
    assert not [text for text in seen if MARKER in text]
    assert len(json.loads(access.read_text().splitlines()[0])) > 5
