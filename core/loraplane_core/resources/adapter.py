"""LoRAAdapter: one tenant's adapter, claimed for a pool."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from loraplane_core.identity import PoolRef
from loraplane_core.resources import uris
from loraplane_core.resources.base import IMMUTABLE, Digest, Model, Name, ObjectMeta, Report, Rule, rules
from loraplane_core.resources.conditions import Condition
from loraplane_core.wire.engine import ResidencyClass

DeletionPolicy = Literal["Retain", "Delete"]
TRAFFIC_TOTAL = 100
VERSION_MAX = 999_999_999  # identity reads at most nine digits


_NO_CREDENTIALS = "credentialsSecretRef is not honoured yet; leave it out"
_ONE_OF_TWO = "activeVersion and traffic exclude each other; keep one of them"
_WHOLE = "the weights must sum to 100"


class PoolReference(Model):
    name: Name
    """Name of the BaseModelPool."""
    namespace: Name | None = None
    """Its namespace; by default the object's own."""


class SecretReference(Model):
    name: Name
    """Name of a Secret in the object's namespace, of type loraplane.dev/source-credentials."""


def _refuse_credentials(given: SecretReference | None) -> None:
    if given is not None:
        raise ValueError(_NO_CREDENTIALS)


class AdapterSource(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("!has(self.credentialsSecretRef)", _NO_CREDENTIALS, ".credentialsSecretRef"),
        )
    )

    uri: Annotated[str, Field(max_length=uris.MAX_LENGTH), uris.SOURCE]
    """Where the artifact lies: file:PATH, relative to the registry's adapter root."""
    digest: Digest | None = None
    """The artifact's digest (64 hexadecimal digits); bytes with another digest are refused."""
    credentials_secret_ref: Annotated[SecretReference | None, AfterValidator(_refuse_credentials)] = None
    """Credentials for the source. Not honoured yet."""


class TrafficWeight(Model):
    version: int = Field(ge=1, le=VERSION_MAX)
    """A validated version of this adapter."""
    weight: int = Field(ge=0, le=TRAFFIC_TOTAL)
    """Its share of requests in percent."""


def _whole_traffic(shares: list[TrafficWeight] | None) -> list[TrafficWeight] | None:
    if shares is None:
        return None
    versions = [share.version for share in shares]
    if len(set(versions)) != len(versions):
        raise ValueError("names a version twice (duplicate)")
    if sum(share.weight for share in shares) != TRAFFIC_TOTAL:
        raise ValueError(_WHOLE)
    return shares


class AdapterSpec(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("self.tenant == oldSelf.tenant", f"spec.tenant {IMMUTABLE}", ".tenant"),
            Rule(
                "has(self.adapter) == has(oldSelf.adapter) && (!has(self.adapter) || self.adapter == oldSelf.adapter)",
                f"spec.adapter {IMMUTABLE}",
                ".adapter",
            ),
            Rule("self.poolRef == oldSelf.poolRef", f"spec.poolRef {IMMUTABLE}", ".poolRef"),
            Rule("!(has(self.activeVersion) && has(self.traffic))", _ONE_OF_TWO),
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
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["version"],
                **rules(Rule(f"self.map(t, t.weight).sum() == {TRAFFIC_TOTAL}", _WHOLE)),
            },
        ),
        AfterValidator(_whole_traffic),
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
        if self.traffic is not None and self.active_version is not None:
            raise ValueError(_ONE_OF_TWO)
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
    """What is wished."""
    status: AdapterStatus = AdapterStatus()
    """What was found; written by the operator only."""

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
