"""A self-signed X.509 certificate of an Ed25519 key, the same bytes whenever and wherever it is made.

Two processes that know one secret can so derive the same certificate, and each can check that the other end holds its
private key. Encodings: DER as in RFC 5280 (certificate), RFC 5958 and RFC 8410 (private key), written here and not by
the library that signs, so that any two of its versions make the same bytes.
"""

import base64
import hashlib
from dataclasses import dataclass, field

_ED25519 = bytes.fromhex("300506032b6570")  # AlgorithmIdentifier
_COMMON_NAME = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS = bytes.fromhex("0603551d13")
_TRUE = bytes.fromhex("0101ff")
# Fixed, and wide: who knows the secret is known, whatever the clock of a host says.
_VALID_FROM, _VALID_TO = b"20000101000000Z", b"99991231235959Z"  # the second: no end that means anything (RFC 5280)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key, both as PEM."""

    certificate: str
    private_key: str = field(repr=False)


def make_certificate(seed: bytes, name: str) -> Certificate:
    """The certificate of the key that grows from this seed of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # of use with a key only: 30 ms

    signer = Ed25519PrivateKey.from_private_bytes(seed)
    verifier = signer.public_key().public_bytes_raw()
    subject = _tag(0x30, _tag(0x31, _tag(0x30, _COMMON_NAME + _tag(0x0C, name.encode()))))
    serial = b"\x01" + hashlib.sha256(verifier).digest()[:15]
    constraints = _tag(0x30, _BASIC_CONSTRAINTS + _TRUE + _tag(0x04, _tag(0x30, _TRUE)))  # it signs itself
    signed = _tag(
        0x30,
        _tag(0xA0, _tag(0x02, b"\x02"))  # version 3
        + _tag(0x02, serial)
        + _ED25519
        + subject
        + _tag(0x30, _tag(0x18, _VALID_FROM) + _tag(0x18, _VALID_TO))
        + subject
        + _tag(0x30, _ED25519 + _tag(0x03, b"\0" + verifier))
        + _tag(0xA3, _tag(0x30, constraints)),
    )
    whole = _tag(0x30, signed + _ED25519 + _tag(0x03, b"\0" + signer.sign(signed)))
    key = _tag(0x30, _tag(0x02, b"\0") + _ED25519 + _tag(0x04, _tag(0x04, seed)))
    return Certificate(_pem("CERTIFICATE", whole), _pem("PRIVATE KEY", key))


def _tag(number: int, content: bytes) -> bytes:
    """An element of DER."""
    size = len(content)
    if size < 0x80:
        return bytes((number, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((number, 0x80 | len(length))) + length + content


def _pem(label: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode("ascii")
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"
