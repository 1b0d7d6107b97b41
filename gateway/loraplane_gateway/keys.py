"""API keys: `lp_<key id>_<secret><checksum>`, all base62.

The checksum (CRC-32 of everything before it, six digits) turns away typos without a look-up and lets
scanners recognise a leaked key. Only HMAC-SHA256(pepper, key) is stored: a stolen table cannot be
tested offline, and a fast hash is right for 190 random bits. The key id is public; logs and audit
entries carry it and nothing else of the key.
"""

import hashlib
import hmac
import re
import secrets
import zlib

PREFIX = "lp"
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 12
SECRET_LENGTH = 32
CHECKSUM_LENGTH = 6
_KEY = re.compile(rf"{PREFIX}_([0-9A-Za-z]{{{ID_LENGTH}}})_[0-9A-Za-z]{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}")


def mint() -> tuple[str, str]:
    """A new (key id, key)."""
    key_id = _random(ID_LENGTH)
    body = f"{PREFIX}_{key_id}_{_random(SECRET_LENGTH)}"
    return key_id, body + checksum(body)


def key_id(key: str) -> str | None:
    """The public id of a well-formed key; None when it is garbled (form or checksum)."""
    match = _KEY.fullmatch(key)
    if match is None or checksum(key[:-CHECKSUM_LENGTH]) != key[-CHECKSUM_LENGTH:]:
        return None
    return match.group(1)


def digest(pepper: bytes, key: str) -> bytes:
    """What is stored and looked up: 32 bytes."""
    return hmac.new(pepper, key.encode(), hashlib.sha256).digest()


def checksum(text: str) -> str:
    value = zlib.crc32(text.encode())
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
