"""Who is served: names, versions and digests of adapters, and the ids of replicas.

The adapter id (tenant, adapter, version, digest) is the only key for residency, caches, logs and
response headers. A bare adapter name never identifies anything by itself.
"""

import re
from typing import NamedTuple

from loraplane_core.errors import InvalidName

NAME_MAX = 63
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
SHORT_DIGEST = 12

#: What the gateway writes into the adapter header for a request to the base model itself. It holds no
#: slash, so it can never be read as an adapter; a request without the header is refused, so a lost
#: header can never turn an adapter's request into a base answer.
BASE_REFERENCE = "base"


def is_name(text: str) -> bool:
    """True for a DNS label of at most 63 characters (tenants, adapters, pools, namespaces)."""
    return len(text) <= NAME_MAX and _NAME.fullmatch(text) is not None


def check_name(text: str, param: str) -> str:
    """The name itself; raises InvalidName, naming `param`, when it is not a DNS label."""
    if not is_name(text):
        raise InvalidName(
            f"{param} must be a DNS label: lower-case letters, digits and '-', at most 63 characters",
            param=param,
        )
    return text


def is_digest(text: str) -> bool:
    """True for 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


class AdapterRef(NamedTuple):
    """A version as people and URLs name it: `tenant/adapter@3`."""

    tenant: str
    adapter: str
    version: int

    def __str__(self) -> str:
        return f"{self.tenant}/{self.adapter}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> "AdapterRef":
        """The inverse of str(); raises InvalidName."""
        name, at, version = text.rpartition("@")
        tenant, slash, adapter = name.partition("/")
        if not (at and slash and is_name(tenant) and is_name(adapter) and _VERSION.fullmatch(version)):
            raise InvalidName("an adapter reference reads tenant/adapter@version")
        return cls(tenant, adapter, int(version))


class AdapterId(NamedTuple):
    """The identity of served weights. `digest` is the artifact's full sha256 in hexadecimal."""

    tenant: str
    adapter: str
    version: int
    digest: str

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.tenant, self.adapter, self.version)

    def __str__(self) -> str:
        return f"{self.ref}#{self.digest[:SHORT_DIGEST]}"

    @classmethod
    def of(cls, ref: AdapterRef, digest: str) -> "AdapterId":
        """Raises InvalidName unless `digest` is a full sha256."""
        if not is_digest(digest):
            raise InvalidName("a digest is 64 lower-case hexadecimal digits")
        return cls(ref.tenant, ref.adapter, ref.version, digest)


class PoolRef(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "PoolRef":
        namespace, slash, name = text.partition("/")
        if not (slash and is_name(namespace) and is_name(name)):
            raise InvalidName("a pool reads namespace/name")
        return cls(namespace, name)


class ReplicaId(NamedTuple):
    """One engine of a pool. Stable over restarts; a restart shows in the engine's `boot`."""

    namespace: str
    pool: str
    ordinal: int

    @property
    def pool_ref(self) -> PoolRef:
        return PoolRef(self.namespace, self.pool)

    @property
    def pod(self) -> str:
        return f"{self.pool}-{self.ordinal}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pool}/{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> "ReplicaId":
        parts = text.split("/")
        if (
            len(parts) != 3
            or not is_name(parts[0])
            or not is_name(parts[1])
            or not re.fullmatch(r"0|[1-9][0-9]{0,5}", parts[2])
        ):
            raise InvalidName("a replica reads namespace/pool/ordinal")
        return cls(parts[0], parts[1], int(parts[2]))


class ModelName(NamedTuple):
    """A client's `model` taken apart: `[base:][tenant/]adapter[@version]`. Absent parts are None."""

    base: str | None
    tenant: str | None
    adapter: str
    version: int | None


def parse_model(text: str) -> ModelName | None:
    """Take an OpenAI `model` apart; None when it cannot name an adapter (it may still name a base exactly).

    The base is split off at the last colon, because base names may hold colons and slashes.
    """
    base, colon, rest = text.rpartition(":")
    tenant, slash, name = rest.rpartition("/")
    adapter, at, version = name.partition("@")
    if (slash and not is_name(tenant)) or not is_name(adapter) or (colon and not base):
        return None
    if at and not _VERSION.fullmatch(version):
        return None
    return ModelName(base if colon else None, tenant if slash else None, adapter, int(version) if at else None)
