"""Which of several weighted versions answers. Pure: every gateway picks alike, and nothing is remembered.

Weighted rendezvous (Schindelhauer and Schomaker 2005): each version draws a number from a hash of (adapter,
key, version), and its weight bends it so that it wins in proportion. A version whose weight changes takes
keys from the others, or gives its own to them; between two versions no more keys move than the weights say.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence

from starlette.types import Scope

from loraplane_core import headers as names
from loraplane_gateway.data.http import header
from loraplane_gateway.data.request import InferenceRequest
from loraplane_gateway.db.serving import ActiveVersion

_SPAN = float(1 << 64)


def pick_version(tenant: str, adapter: str, versions: Sequence[ActiveVersion], key: str) -> ActiveVersion:
    """One of `versions` (at least one, each with a weight above 0), the same one for the same key."""
    if len(versions) == 1:
        return versions[0]
    return max(versions, key=lambda each: each.weight / -math.log(_drawn(tenant, adapter, each.id.version, key)))


def sticky_key(scope: Scope, request: InferenceRequest) -> str:
    """What keeps a caller with one version: its own header, else the request's `user`; else each request is alone.

    `request` shows `user` only when it is a string, which the engine may still refuse otherwise.
    """
    return header(scope, names.STICKY) or request.user or secrets.token_hex(8)


def _drawn(tenant: str, adapter: str, version: int, key: str) -> float:
    """A number in (0, 1), uniform over keys and independent between versions."""
    text = f"{tenant}/{adapter}@{version}\n{key}".encode(errors="surrogatepass")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") + 0.5) / _SPAN
