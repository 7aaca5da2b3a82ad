"""TLS without sockets: the client's layer against a server of the standard library, bytes handed over in memory."""

import ssl

import pytest

from diptych.bench.tls_layer import TlsLayer

from .conftest import Certificate


class TlsServer:
    """The other side."""

    def __init__(self, certificate: Certificate) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = certificate.server.wrap_bio(self._received, self._to_send, server_side=True)
        self.is_ready = False

    def receive(self, data: bytes) -> bytes:
        """What the client said, decrypted."""
        self._received.write(data)
        try:
            if not self.is_ready:
                self._tls.do_handshake()
                self.is_ready = True
            return self._tls.read(1 << 16)
        except ssl.SSLWantReadError:
            return b""

    def say(self, data: bytes) -> None:
        """Encrypt it."""
        self._tls.write(data)

    def say_goodbye(self) -> None:
        """Nothing follows."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()

    def to_send(self) -> bytes:
        """Bytes for the client."""
        return self._to_send.read()


def connected(certificate: Certificate, name: str = "localhost", step: int = 1 << 16) -> tuple[TlsLayer, TlsServer]:
    """Both sides after the handshake; bytes reach the client in pieces of ``step``."""
    client = TlsLayer(ssl.create_default_context(cafile=str(certificate.file)), name)
    server = TlsServer(certificate)
    server.receive(client.start())
    for _ in range(3):
        data = server.to_send()
        for start in range(0, len(data), step):
            plain, reply = client.receive(data[start : start + step])
            assert plain == b""
            server.receive(reply)
    return client, server


@pytest.mark.parametrize("step", [1, 100, 1 << 16])
def test_what_is_said_comes_out_at_the_other_side_however_it_is_cut(certificate: Certificate, step: int) -> None:
    client, server = connected(certificate, step=step)
    assert client.is_ready and server.is_ready
    assert server.receive(client.encrypt(b"request")) == b"request"
    said = [b"a" * 70_000, b"b", b"c" * 20_000]
    for piece in said:
        server.say(piece)
    data = server.to_send()
    heard = [client.receive(data[start : start + step])[0] for start in range(0, len(data), step)]
    assert b"".join(heard) == b"".join(said) and not client.has_ended


def test_the_end_that_a_server_announces_is_seen_after_what_it_said(certificate: Certificate) -> None:
    client, server = connected(certificate)
    server.say(b"last")
    server.say_goodbye()
    assert client.receive(server.to_send())[0] == b"last" and client.has_ended


def test_a_certificate_of_another_name_is_refused(certificate: Certificate) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        connected(certificate, name="example.com")


def test_a_server_that_speaks_no_tls_is_refused(certificate: Certificate) -> None:
    client = TlsLayer(ssl.create_default_context(), "localhost")
    client.start()
    with pytest.raises(ssl.SSLError):
        client.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
