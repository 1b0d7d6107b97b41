"""The registry's admin listener as the operator and the CLI speak to it.

Platform (admin key):
  POST/GET        /admin/tenants                       TenantSpec -> Tenant | Tenants
  GET/DELETE      /admin/tenants/{tenant}
  POST/GET        /admin/tenants/{tenant}/keys         KeySpec -> NewKey | Keys
  DELETE          /admin/tenants/{tenant}/keys/{id}
  GET             /admin/tenants/{tenant}/adapters                          -> AdapterList
  GET             /admin/tenants/{tenant}/adapters/{adapter}                -> Adapter (404 not_found)
  POST            /admin/tenants/{tenant}/adapters/{adapter}/versions       RegisterVersion -> Version (?wait=SECONDS)
  POST            /admin/tenants/{tenant}/adapters/{adapter}/versions/{v}/verify   -> Version (?wait=SECONDS)
  DELETE          /admin/tenants/{tenant}/adapters/{adapter}/versions/{v}
  POST            /admin/tenants/{tenant}/adapters/{adapter}/activate       Activate -> Adapter
  POST            /admin/tenants/{tenant}/adapters/{adapter}/traffic        SetTraffic -> Adapter
  POST            /admin/tenants/{tenant}/adapters/{adapter}/rollback       Rollback -> Adapter
  POST            /admin/tenants/{tenant}/uploads                           -> Upload
  PUT             /admin/tenants/{tenant}/uploads/{id}/files/{name}         body from Upload-Offset -> Upload
  GET             /admin/tenants/{tenant}/uploads/{id}                      -> Upload
Operator (operator credential):
  PUT/DELETE      /operator/pools/{namespace}/{name}   PoolReport
  PUT             /operator/claims/{uid}               ClaimRequest -> Claim
  GET             /operator/claims                     -> Claims
  DELETE          /operator/claims/{uid}               ?versions=retain|delete
  POST            /operator/claims/{uid}/register      RegisterSource -> Version
  POST            /operator/claims/{uid}/activate      Activate -> Adapter
  POST            /operator/claims/{uid}/traffic       SetTraffic -> Adapter
  POST            /operator/warm/{tenant}/{adapter}    Warmed -> Adapter: flips or ends that intent, or does nothing
  GET             /operator/feed?cursor=N              text/event-stream of FeedEvent; cursor absent or too old: one
                                                       `event: snapshot` (FeedSnapshot), then `event: change` (Adapter
                                                       or removed) with `id:` the cursor; comment heartbeats every 1 s
Both: GET /health/live, /health/ready without a credential.
Artifact listener (fetch credential, headers X-Loraplane-Pool and X-Loraplane-Epoch):
  GET             /artifacts/{digest}/{adapter_config.json|adapter_model.safetensors}
"""

from typing import Any, Literal

import msgspec

from loraplane_core.wire import PROTOCOL

VersionState = Literal["unverified", "pending_base", "ingesting", "validated", "rejected"]
KeyScope = Literal["inference", "admin"]


class TenantSpec(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    namespaces: list[str] = []  # those that may claim for it


class Tenant(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    namespaces: list[str]
    created_at: str


class Tenants(msgspec.Struct, kw_only=True, frozen=True):
    tenants: list[Tenant]


class KeySpec(msgspec.Struct, kw_only=True, frozen=True):
    name: str = ""
    scopes: list[KeyScope] = msgspec.field(default_factory=lambda: ["inference"])
    expires_at: str | None = None  # RFC 3339


class Key(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    tenant: str
    name: str
    scopes: list[KeyScope]
    created_at: str
    expires_at: str | None = None
    revoked_at: str | None = None


class NewKey(msgspec.Struct, kw_only=True, frozen=True):
    """The only answer that ever holds a secret."""

    key: Key
    secret: str


class Keys(msgspec.Struct, kw_only=True, frozen=True):
    keys: list[Key]


class Source(msgspec.Struct, kw_only=True, frozen=True):
    """Where an artifact comes from: `file:PATH` below the adapter root, or `upload:ID`."""

    uri: str
    digest: str | None = None  # refused when the bytes have another


class RegisterVersion(msgspec.Struct, kw_only=True, frozen=True):
    source: Source
    pool: str | None = None  # namespace/name; default: the adapter's pool, or the only one the tenant may use
    base_model: str | None = None  # the declared base; default: the pool's
    activate: bool = True


#: Reasons of a rejected version that say nothing about the artifact: registering its source again tries again.
PASSING_REJECTIONS = frozenset({"source_unavailable", "source_not_found", "deadline_exceeded", "internal_error"})


class Version(msgspec.Struct, kw_only=True, frozen=True):
    tenant: str
    adapter: str
    version: int
    state: VersionState
    reason: str = ""  # stable code when rejected or waiting
    message: str = ""
    digest: str = ""
    bytes: int = 0
    rank: int = 0
    parameters: int = 0  # elements of all its tensors; 0 = ingested by a release that did not count
    target_modules: list[str] = []
    base_model: str = ""
    base_digest: str = ""
    base_evidence: Literal["artifact", "declared", ""] = ""
    weight: int = 0
    is_active: bool = False
    path: str = ""
    created_at: str = ""


class Adapter(msgspec.Struct, kw_only=True, frozen=True):
    """One adapter with all its versions; also what a change event carries."""

    tenant: str
    adapter: str
    pool: str = ""  # namespace/name
    warm_replicas: int = 1
    pinned: bool = False
    claim_uid: str = ""
    claim_ref: str = ""  # namespace/name of the object
    activation_owner: Literal["registry", "object"] = "registry"
    active_version: int = 0  # of several weighted ones the heaviest, then the oldest; 0 = none
    intent_version: int = 0  # becomes active once warm (Activate.wait); the operator warms it beside the active ones
    previous_version: int = 0  # what a rollback without a target goes to; 0 = none
    source_hash: str = ""  # of the source that the claim's object registered last; "" = none, or not told
    source_version: int = 0  # the version that source is; it may have been removed since
    versions: list[Version] = []


class AdapterList(msgspec.Struct, kw_only=True, frozen=True):
    adapters: list[Adapter]


class Activate(msgspec.Struct, kw_only=True, frozen=True):
    version: int
    expect_active: int | None = None  # compare-and-set on the version active before
    wait: Literal["", "warm"] = ""  # warm: flip once the operator saw it warm, or 504 `not_warm` and no change
    deadline_s: float = 30.0  # of the wait


class Share(msgspec.Struct, kw_only=True, frozen=True):
    version: int
    weight: int  # percent, 1 to 100


class SetTraffic(msgspec.Struct, kw_only=True, frozen=True):
    """All weights of an adapter in one transaction; they sum to 100, versions not named get 0."""

    shares: list[Share]
    expect: list[Share] | None = None  # compare-and-set on the shares before


class Warmed(msgspec.Struct, kw_only=True, frozen=True):
    """The operator's word that a version is warm wherever the adapter should be warm, or that it cannot be."""

    version: int
    digest: str  # empty with a refusal, so that a registry that does not know refusals takes it for no word at all
    refusal: str = ""  # why there is no place for it; what waits for that ends with these words


class Rollback(msgspec.Struct, kw_only=True, frozen=True):
    version: int | None = None  # default: the one that served alone before; while several do, before the split
    wait: Literal["", "warm"] = ""  # as for Activate
    deadline_s: float = 30.0


class UploadFile(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    received: int


class Upload(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    files: list[UploadFile] = []


class PoolReport(msgspec.Struct, kw_only=True, frozen=True):
    """The operator's report. `config` and `base_digest` are empty until an engine told them."""

    protocol: int = PROTOCOL
    base_model: str
    aliases: list[str] = []
    base_digest: str = ""
    config: dict[str, Any] = {}
    max_rank: int = 64
    max_model_len: int = 0
    replicas: int = 1
    allowed_tenants: list[str] = []  # empty = all
    allowed_namespaces: list[str] = []  # empty = all
    credential_epoch: int = 1


class ClaimRequest(msgspec.Struct, kw_only=True, frozen=True):
    ref: str  # namespace/name of the object
    tenant: str
    adapter: str
    pool: str
    warm_replicas: int = 1
    pinned: bool = False
    owns_activation: bool = False


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    uid: str
    ref: str
    tenant: str
    adapter: str
    pool: str


class Claims(msgspec.Struct, kw_only=True, frozen=True):
    claims: list[Claim]


class RegisterSource(msgspec.Struct, kw_only=True, frozen=True):
    """Idempotent by (uid, source_hash): asking again returns the same version, in its state of now.

    That may be another one than before: bytes that were a version already are that version. With
    `known_only` nothing is made: a source whose version was removed is answered with 410.
    A known source is not activated a second time, which could undo a roll-back, unless with `returned`:
    the object named another one meanwhile and came back to this.
    """

    source: Source
    source_hash: str
    known_only: bool = False
    returned: bool = False


class FeedSnapshot(msgspec.Struct, kw_only=True, frozen=True):
    protocol: int = PROTOCOL
    cursor: int
    adapters: list[Adapter]
    tenants: list[str]


class FeedChange(msgspec.Struct, kw_only=True, frozen=True):
    """`kind` says which field is filled: an adapter as it is now (None = gone), or a tenant created or removed."""

    cursor: int
    kind: Literal["adapter", "tenant", "pool"]
    tenant: str = ""
    name: str = ""  # adapter's or pool's name
    adapter: Adapter | None = None
