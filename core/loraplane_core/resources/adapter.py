"""LoRAAdapter: one tenant's adapter, claimed for a pool."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from loraplane_core.identity import PoolRef
from loraplane_core.resources import uris
from loraplane_core.resources.base import Digest, Model, Name, ObjectMeta, Report, Rule, rules
from loraplane_core.resources.conditions import Condition
from loraplane_core.wire.engine import ResidencyClass

DeletionPolicy = Literal["Retain", "Delete"]
TRAFFIC_TOTAL = 100
VERSION_MAX = 999_999_999  # identity reads at most nine digits


def _source_uri(uri: str) -> str:
    uris.source_path(uri)
    return uri


class PoolReference(Model):
    name: Name
    """Name of the BaseModelPool."""
    namespace: Name | None = None
    """Its namespace; by default the object's own."""


class SecretReference(Model):
    name: Name
    """Name of a Secret in the object's namespace, of type loraplane.dev/source-credentials."""


class AdapterSource(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(uris.cel("self.uri", uris.FILE_PATTERN), f"source.uri {uris.SOURCE_MESSAGE}", ".uri"),
            Rule("!has(self.credentialsSecretRef)", "source.credentialsSecretRef is not honoured yet"),
        )
    )

    uri: Annotated[str, AfterValidator(_source_uri), Field(min_length=1, max_length=uris.MAX_LENGTH)]
    """Where the artifact lies: file:PATH, relative to the registry's adapter root."""
    digest: Digest | None = None
    """The artifact's digest (64 hexadecimal digits); bytes with another digest are refused."""
    credentials_secret_ref: SecretReference | None = None
    """Credentials for the source. Not honoured yet."""

    @model_validator(mode="after")
    def _no_credentials(self) -> Self:
        if self.credentials_secret_ref is not None:
            raise ValueError("credentialsSecretRef is not honoured yet")
        return self


class TrafficWeight(Model):
    version: int = Field(ge=1, le=VERSION_MAX)
    """A validated version of this adapter."""
    weight: int = Field(ge=0, le=TRAFFIC_TOTAL)
    """Its share of requests in percent."""


class AdapterSpec(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("self.tenant == oldSelf.tenant", "spec.tenant is immutable", ".tenant"),
            Rule(
                "has(self.adapter) == has(oldSelf.adapter) && (!has(self.adapter) || self.adapter == oldSelf.adapter)",
                "spec.adapter is immutable, also from unset",
            ),
            Rule("self.poolRef == oldSelf.poolRef", "spec.poolRef is immutable, also from unset", ".poolRef"),
            Rule(
                "!(has(self.activeVersion) && has(self.traffic))",
                "spec.activeVersion and spec.traffic exclude each other",
            ),
            Rule(
                "!has(self.traffic) || self.traffic.map(t, t.weight).sum() == 100",
                "the weights in spec.traffic must sum to 100",
            ),
        )
    )

    tenant: Name
    """The tenant who owns the adapter. Immutable."""
    adapter: Name | None = None
    """The adapter's name, which clients send as `model`; by default the object's name. Immutable."""
    pool_ref: PoolReference
    """The pool that serves it. Immutable."""
    source: AdapterSource
    """Where its bytes come from; a changed source registers a new version."""
    active_version: int | None = Field(default=None, ge=1, le=VERSION_MAX)
    """The version that serves. While this or `traffic` is set, the object owns activation."""
    traffic: Annotated[
        list[TrafficWeight] | None,
        Field(
            min_length=1,
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["version"]},
        ),
    ] = None
    """Shares of several versions, summing to 100."""
    warm_replicas: int = Field(default=1, ge=0, le=64)
    """On how many replicas the adapter is kept resident."""
    pinned: bool = False
    """Keep it in device memory, not merely in host memory, on those replicas."""
    deletion_policy: DeletionPolicy = "Retain"
    """What deleting this object does to the adapter's versions in the registry."""

    @model_validator(mode="after")
    def _activation(self) -> Self:
        if self.traffic is None:
            return self
        if self.active_version is not None:
            raise ValueError("activeVersion and traffic exclude each other")
        versions = [share.version for share in self.traffic]
        if len(set(versions)) != len(versions):
            raise ValueError("traffic names a version twice")
        total = sum(share.weight for share in self.traffic)
        if total != TRAFFIC_TOTAL:
            raise ValueError(f"the weights in traffic must sum to 100, not {total}")
        return self


class AdapterReplica(Report):
    name: str
    """Replica id: namespace/pool/ordinal."""
    residency: ResidencyClass
    """Where the replica holds the adapter."""
    since: str = ""
    """RFC 3339 time of the last change of residency."""
    message: str = ""
    """Why a load failed."""


class AdapterStatus(Report):
    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Claimed, Ingested, Validated, Placed, Ready, Deleting."""
    observed_generation: int = 0
    """The metadata.generation this status describes."""
    version: int | None = None
    """The version that the current source was registered as."""
    active_version: int | None = None
    """The version that serves new requests."""
    base_model: str | None = None
    """The base model it was validated against."""
    digest: str | None = None
    """Digest of the registered version."""
    rank: int | None = None
    """Largest rank of the registered version."""
    target_modules: list[str] = Field(default=[])
    """The linears it changes."""
    bytes: int | None = None
    """Size of the artifact."""
    replicas: list[AdapterReplica] = Field(default=[])
    """Where it is resident; live truth is each engine's /state."""
    ready_replicas: int = 0
    """Replicas that should be warm and are."""
    warm_replicas: int = 0
    """Replicas that should be warm."""
    resident: str = ""
    """readyReplicas/warmReplicas, for people."""


class LoRAAdapter(Model):
    """A named LoRA adapter of one tenant, served by a BaseModelPool."""

    api_version: Literal["loraplane.dev/v1alpha1"] = "loraplane.dev/v1alpha1"
    kind: Literal["LoRAAdapter"] = "LoRAAdapter"
    metadata: ObjectMeta
    spec: AdapterSpec
    status: AdapterStatus = AdapterStatus()

    @property
    def adapter(self) -> str:
        """The adapter's effective name."""
        return self.spec.adapter or self.metadata.name

    @property
    def pool(self) -> PoolRef:
        return PoolRef(self.spec.pool_ref.namespace or self.metadata.namespace, self.spec.pool_ref.name)

    @property
    def owns_activation(self) -> bool:
        return self.spec.active_version is not None or self.spec.traffic is not None
