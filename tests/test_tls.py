"""One key makes both ends' certificates; who has another key, or poses as the other role, gets no connection."""

import contextlib
import ssl
import subprocess
from pathlib import Path

import pytest

from diptych.control.errors import ConfigError
from diptych.tls.certificate import make_certificate
from diptych.tls.ed25519 import public_key, sign
from diptych.tls.shared_key import SharedKey, read_key_file

KEY = SharedKey(b"k" * 32)

# RFC 8032, section 7.1: seed, public key, message, signature
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "verifier", "message", "signature"), VECTORS)
def test_signatures_are_those_of_the_rfc(seed: str, verifier: str, message: str, signature: str) -> None:
    assert public_key(bytes.fromhex(seed)).hex() == verifier
    assert sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


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
    assert make_certificate(b"s" * 32, "a") == make_certificate(b"s" * 32, "a")
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
