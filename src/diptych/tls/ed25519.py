"""Ed25519 signatures (RFC 8032, section 5.1), for the certificates that certificate.py makes.

Slow (some milliseconds) and not in constant time: it signs once at the start of a process, and no peer can measure it.
What travels afterwards is signed by OpenSSL.
"""

import hashlib

SEED_BYTES = 32

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_BASE_Y = 4 * pow(5, -1, _P) % _P

_Point = tuple[int, int, int, int]  # extended coordinates: x = X / Z, y = Y / Z, x * y = T / Z


def public_key(seed: bytes) -> bytes:
    """The 32 bytes that verify what ``seed`` signs."""
    return _encode(_times(_scalar(seed), _base()))


def sign(seed: bytes, message: bytes) -> bytes:
    """The 64 bytes of the signature."""
    scalar, verifier = _scalar(seed), public_key(seed)
    nonce = _number(hashlib.sha512(seed).digest()[32:], message)
    commitment = _encode(_times(nonce, _base()))
    challenge = _number(commitment, verifier, message)
    return commitment + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def _scalar(seed: bytes) -> int:
    """The secret number of a seed: bits are fixed as the RFC says."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes; {SEED_BYTES}")
    number = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    return number & ((1 << 254) - 8) | 1 << 254


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _base() -> _Point:
    """The point of the curve with y = 4/5 and even x."""
    square = (_BASE_Y**2 - 1) * pow(_D * _BASE_Y**2 + 1, -1, _P)
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = _P - x if x & 1 else x
    return x, _BASE_Y, 1, x * _BASE_Y % _P


def _add(p: _Point, q: _Point) -> _Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _P, (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(count: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while count:
        if count & 1:
            total = _add(total, point)
        point = _add(point, point)
        count >>= 1
    return total


def _encode(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
