"""The handshake of a connection: both ends prove that they know the secret, and derive its keys. No I/O.

    receiver -> sender    GREETING: magic, version, nonce
    sender -> receiver    HELLO: nonce, instance, line, dial number, KV format, HMAC-SHA256 over all so far
    receiver -> sender    WELCOME: instance, KV format, HMAC-SHA256 over all so far

An *instance* is one life of a connector: a restarted worker has another one. A *line* is an instance and the address
that it has dialled; the *dial number* grows with every connection on a line, so that a receiver can tell a connection
that is late from the one that replaced it.

Security. The secret is 32 random bytes that the front end draws at its start and gives to its workers. The handshake
proves that the other end knows it, in this role (the label in each HMAC keeps a proof from serving the other role) and
now (each end's nonce keeps old proofs from being played back). Both traffic keys are HMACs of the secret over the whole
conversation; the seals of frames.py under them prove that each header, and the body of each frame but DATA, was written
by that end, for this connection, in this order: they cannot be forged, changed, repeated, left out or moved.

It does not prove more than that. Between hosts the whole conversation lies inside TLS 1.3 (encrypted_socket.py), which
makes it confidential, protects each byte, and has forward secrecy. Without TLS nothing is confidential: KV, first
tokens, names of requests and the KV formats travel in the clear, and prompts can be read out of their KV. The body of
DATA has a CRC-32 alone, which detects damage; an attacker on the path who rewrites packets can change KV so that the
CRC still fits. All workers share the secret, so it does not tell them apart: each of them can speak for any other. An
attacker on the path can delay or cut connections, and one who only reaches the port can crowd out handshakes that are
under way (MAX_UNPROVED of stream_connector.py). There is no forward secrecy, since there is no secrecy. Between hosts,
TLS is left out only on request (--transfer-plain), for a network that only workers can reach, or a tunnel that encrypts
(WireGuard, IPsec). The protocol was designed here and has had no review from outside.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from diptych.runtime.transfer.kv_format import PROTOCOL_VERSION, KVFormat
from diptych.runtime.transfer.stream.encrypted_socket import KVEncryption
from diptych.runtime.transfer.stream.frames import ProtocolError

MAGIC = b"diptychkv" + PROTOCOL_VERSION.to_bytes(2, "little")
NONCE_BYTES = 32
INSTANCE_BYTES = 16
LINE_BYTES = 8
MAX_FORMAT_BYTES = 4096
_PROOF_BYTES = 32

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
_HELLO = struct.Struct(f"<{NONCE_BYTES}s{INSTANCE_BYTES}s{LINE_BYTES}sQ{_PROOF_BYTES}sH")
_WELCOME = struct.Struct(f"<{INSTANCE_BYTES}s{_PROOF_BYTES}sH")
HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size


@dataclass(frozen=True, slots=True)
class Identity:
    """What a connector states about itself, and the secret that it never sends."""

    secret: bytes = field(repr=False)
    instance: bytes
    kv_format: KVFormat
    encryption: KVEncryption | None = None  # None: what travels can be read on its way
    format_bytes: bytes = field(init=False)  # of kv_format, as they travel

    def __post_init__(self) -> None:
        object.__setattr__(self, "format_bytes", self.kv_format.to_bytes())


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the other side has stated with its proof, and the keys of the connection."""

    instance: bytes
    line: bytes  # with the instance in front; empty at the sender
    dial: int
    kv_format: KVFormat
    key_to_receiver: bytes = field(repr=False)
    key_to_sender: bytes = field(repr=False)


def greeting() -> bytes:
    """Receiver: the first bytes on a connection."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def hello(me: Identity, greeted: bytes, address: str, dial: int) -> bytes:
    """Sender: the answer to a greeting at this address. Raises ProtocolError when it is not one."""
    if not greeted.startswith(MAGIC):
        raise ProtocolError("the other side does not speak this version of the KV protocol")
    fmt, nonce = me.format_bytes, secrets.token_bytes(NONCE_BYTES)
    line = hashlib.blake2s(address.encode(), digest_size=LINE_BYTES).digest()
    said = nonce + me.instance + line + struct.pack("<Q", dial)
    proof = _proof(me.secret, b"sender", greeted, said, fmt)
    return _HELLO.pack(nonce, me.instance, line, dial, proof, len(fmt)) + fmt


def format_bytes_of(message: bytes | bytearray) -> int:
    """How many bytes of KV format follow the fixed part of a HELLO or WELCOME. Raises ProtocolError."""
    count = int.from_bytes(message[-2:], "little")
    if not 1 <= count <= MAX_FORMAT_BYTES:
        raise ProtocolError(f"a KV format of {count} bytes; 1 to {MAX_FORMAT_BYTES}")
    return count


def accept_hello(me: Identity, greeted: bytes, message: bytes) -> tuple[bytes, Introduction]:
    """Receiver: the WELCOME and what the sender stated. Raises ProtocolError when the proof is wrong, ConfigError for a
    KV format that is none."""
    nonce, instance, line, dial, proof, _ = _HELLO.unpack_from(message)
    theirs = message[HELLO_BYTES:]
    said = nonce + instance + line + struct.pack("<Q", dial)
    if not hmac.compare_digest(proof, _proof(me.secret, b"sender", greeted, said, theirs)):
        raise ProtocolError("the sender did not prove that it knows the secret")
    fmt = me.format_bytes
    answer = _proof(me.secret, b"receiver", greeted, message, me.instance, fmt)
    keys = _keys(me.secret, greeted, message, answer)
    introduction = Introduction(instance, instance + line, dial, KVFormat.from_bytes(theirs), *keys)
    return _WELCOME.pack(me.instance, answer, len(fmt)) + fmt, introduction


def accept_welcome(me: Identity, greeted: bytes, said: bytes, message: bytes) -> Introduction:
    """Sender: what the receiver stated. ``said``: the HELLO that it answers. Raises ProtocolError when the proof is
    wrong."""
    instance, proof, _ = _WELCOME.unpack_from(message)
    theirs = message[WELCOME_BYTES:]
    if not hmac.compare_digest(proof, _proof(me.secret, b"receiver", greeted, said, instance, theirs)):
        raise ProtocolError("the receiver did not prove that it knows the secret")
    keys = _keys(me.secret, greeted, said, proof)
    return Introduction(instance, b"", 0, KVFormat.from_bytes(theirs), *keys)


def _proof(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, label, "sha256")
    for part in parts:
        mac.update(struct.pack("<Q", len(part)) + part)
    return mac.digest()


def _keys(secret: bytes, *conversation: bytes) -> tuple[bytes, bytes]:
    to_receiver = _proof(secret, b"key to receiver", *conversation)
    return to_receiver, _proof(secret, b"key to sender", *conversation)
