"""One key makes both ends' certificates; who has another key, or poses as the other role, gets no connection."""

import contextlib
import hashlib
import ssl
import subprocess
from pathlib import Path

import pytest

from diptych.control.errors import ConfigError
from diptych.tls.certificate import make_certificate
from diptych.tls.shared_key import SharedKey, read_key_file

KEY = SharedKey(b"k" * 32)


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The TLS version of a connection between the two. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = server.wrap_bio(to_server, to_client, server_side=True)
    far = client.wrap_bio(to_client, to_server)
    for _ in range(4):
        for end in (far, near):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    far.write(b"hello")
    assert near.read() == b"hello"
    return near.version() or ""


def test_both_ends_derive_the_same_certificates_and_speak_tls_1_3() -> None:
    made = make_certificate(b"s" * 32, "a").certificate.encode()  # these bytes, whichever library signs
    assert hashlib.sha256(made).hexdigest() == "e34744262703302589d3747b09c5bd5fbce325e76b85ddee579493009e932ec1"
    server = SharedKey(b"k" * 32).server_tls("front end", "worker")
    assert shake(server, KEY.client_tls("worker", "front end")) == "TLSv1.3"


def test_another_key_or_the_wrong_role_is_refused() -> None:
    server = KEY.server_tls("front end", "worker")
    for client in (
        SharedKey(b"o" * 32).client_tls("worker", "front end"),
        KEY.client_tls("front end", "front end"),
        KEY.client_tls("worker", "worker"),
        KEY.client_tls("KV sender", "KV receiver"),
    ):
        with pytest.raises(ssl.SSLError):
            shake(server, client)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        shake(server, stranger)


def test_keys_for_different_purposes_differ() -> None:
    purposes = ("KV", "front end", "worker", "KV sender", "KV receiver")
    assert len({KEY.derived(purpose) for purpose in purposes}) == len(purposes)
    assert "kkk" not in repr(KEY)


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_file(path)
    path.write_bytes(b"k" * 32 + b"\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="every user"):
        read_key_file(path)
    path.chmod(0o640)
    assert read_key_file(path) == KEY
    for content, words in ((b"short", "has 5 bytes"), (b"x" * 5000, "has 4097 bytes")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_key_file(path)


def test_openssl_reads_and_verifies_the_certificate(tmp_path: Path) -> None:
    made = make_certificate(b"s" * 32, "worker")
    (tmp_path / "certificate").write_text(made.certificate)
    command = ["openssl", "verify", "-CAfile", "certificate", "certificate"]
    try:
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert ran.stdout == "certificate: OK\n", ran.stderr
