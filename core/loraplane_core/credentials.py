"""Credentials derived from one master key, so that nothing but the master need be stored (design §2).

role key   = HMAC-SHA256(master, "role/" + role)
credential = HMAC-SHA256(role key, namespace/pool/epoch)

The step through a role key lets the data gateway hold the `data` and `state` role keys, and so reach
every pool, while it cannot derive an `admin` credential (ADR-0003).
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from loraplane_core.identity import PoolRef

Role = Literal["data", "state", "admin", "fetch"]
ROLES: tuple[Role, ...] = ("data", "state", "admin", "fetch")
KEY_BYTES = 32


def new_master() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def read_key(path: Path) -> bytes:
    """The key in a file of hexadecimal digits. Raises ValueError when it is missing, short or not hex."""
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no hexadecimal key: {error}") from error
    if len(key) < KEY_BYTES:
        raise ValueError(f"{path} holds {len(key)} bytes; a key has at least {KEY_BYTES}")
    return key


def role_key(master: bytes, role: Role) -> bytes:
    return _hmac(master, f"role/{role}")


def engine_credential(key: bytes, pool: PoolRef, epoch: int) -> str:
    """The bearer token for engines of one pool; `key` is a role key."""
    return _hmac(key, f"{pool}/{epoch}").hex()


def operator_credential(master: bytes) -> str:
    """The bearer token with which the operator authenticates to the registry."""
    return _hmac(master, "operator").hex()


def accepted(token: str, valid: Iterable[str]) -> bool:
    """Constant-time membership; every candidate is compared."""
    found = False
    for candidate in valid:
        found |= hmac.compare_digest(token.encode(), candidate.encode())
    return found


def bearer(header: str | None) -> str | None:
    """The token of an Authorization header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
