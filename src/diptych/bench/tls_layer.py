"""TLS between a connection and its socket: bytes in, bytes out, no socket.

What was received encrypted keeps the time at which it came: decrypting it happens later, on the client's time.
"""

import ssl


class TlsLayer:
    """The client's side of an encrypted connection. Methods raise ssl.SSLError.

    is_ready: the handshake is over. has_ended: the server has said that nothing follows.
    """

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=server_name)
        self.is_ready = False
        self.has_ended = False

    def start(self) -> bytes:
        """The first bytes to send."""
        self._shake_hands()
        return self._to_send.read()

    def encrypt(self, data: bytes) -> bytes:
        """What to send instead of ``data``; the handshake must be over."""
        self._tls.write(data)
        return self._to_send.read()

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """(decrypted, to be sent in return) for bytes that came."""
        self._received.write(data)
        if not self.is_ready:
            self._shake_hands()
        pieces = []
        try:
            while self.is_ready and (piece := self._tls.read(1 << 16)):
                pieces.append(piece)
            self.has_ended = self.is_ready
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.has_ended = True
        return b"".join(pieces), self._to_send.read()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
            self.is_ready = True
        except ssl.SSLWantReadError:
            pass
