"""BaseModelPool: replicas of one base model under one engine configuration."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from loraplane_core.identity import PoolRef
from loraplane_core.resources import uris
from loraplane_core.resources.base import (
    IMMUTABLE,
    NAME_HELP,
    NAME_PATTERN,
    Digest,
    Grammar,
    Model,
    Name,
    ObjectMeta,
    Report,
    Rule,
    rules,
)
from loraplane_core.resources.conditions import Condition
from loraplane_core.resources.quantity import Amounts, Quantity

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]
#: StatefulSet pods carry `<pool>-<hash of ten>` in a label of 63 characters.
POOL_NAME_MAX = 52

BaseName = Annotated[
    str,
    Field(max_length=128),
    Grammar(
        "[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?",
        "must be letters, digits and . _ : / -, with a letter or digit at both ends",
    ),
]
Image = Annotated[
    str,
    Field(max_length=512),
    Grammar(
        "[A-Za-z0-9][A-Za-z0-9._/:@-]*", "must be a container image such as registry.example.com/loraplane/engine:1.0"
    ),
]
_REPEATED = "aliases must not repeat the base's name"
_NO_AUTOSCALING = "autoscaling is not honoured yet; set replicas"
_SET: JsonDict = {"x-kubernetes-list-type": "set"}


def _distinct(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("holds a name twice (duplicate)")
    return names


#: Never empty: an empty list of who may would read like "nobody" and be taken for "all".
NameSet = Annotated[list[Name], Field(min_length=1, max_length=256, json_schema_extra=_SET), AfterValidator(_distinct)]


class BaseModelSource(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("!(self.name in self.aliases)", _REPEATED, ".aliases"),
        )
    )

    name: BaseName
    """The base's name, which clients may send as `model`."""
    aliases: Annotated[list[BaseName], AfterValidator(_distinct)] = Field(
        default=[], max_length=16, json_schema_extra=_SET
    )
    """Other names of the same weights, for example the one that adapters were trained under."""
    uri: Annotated[str, Field(max_length=uris.MAX_LENGTH), uris.BASE]
    """Where the weights lie: file:PATH below the model root, or pvc://CLAIM/PATH (mounted read-only)."""
    digest: Digest | None = None
    """Digest of the base; a replica that finds another does not serve."""

    @model_validator(mode="after")
    def _aliases_differ(self) -> Self:
        if self.name in self.aliases:
            raise ValueError(_REPEATED)
        return self


class Autoscaling(Model):
    min: int = Field(ge=0, le=64)
    """Fewest replicas."""
    max: int = Field(ge=1, le=64)
    """Most replicas."""
    target_in_flight: int = Field(ge=1)
    """Requests in flight per replica that are aimed at."""


def _refuse_autoscaling(given: Autoscaling | None) -> None:
    if given is not None:
        raise ValueError(_NO_AUTOSCALING)


class EngineSpec(Model):
    dtype: EngineDtype = "auto"
    """Precision of weights and cache; auto is bfloat16 on a GPU and float32 on a CPU."""
    max_model_len: int | None = Field(default=None, ge=1, le=1 << 20)
    """Longest sequence in tokens; by default the base's own limit."""
    max_batch_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Positions computed in one step."""
    max_sequences: int | None = Field(default=None, ge=1, le=1 << 16)
    """Requests running at once."""
    adapter_memory: Quantity | None = None
    """The most of device memory that adapters may take."""
    host_cache: Quantity | None = None
    """Host memory for adapters."""
    disk_cache: Quantity | None = None
    """Disk space for adapters."""
    slots: int | None = Field(default=None, ge=1, le=1 << 16)
    """Caps the adapters in device memory at once; by default only bytes decide."""
    max_rank: int = Field(default=64, ge=1, le=1024)
    """Largest rank an adapter may have."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of one engine; by default its share of the CPUs."""


class ResourceRequirements(Model):
    limits: Amounts = Field(default={})
    """As in a container."""
    requests: Amounts = Field(default={})
    """As in a container."""


class PoolSpec(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("self.baseModel == oldSelf.baseModel", f"spec.baseModel {IMMUTABLE}", ".baseModel"),
            Rule("!has(self.autoscaling)", _NO_AUTOSCALING, ".autoscaling"),
        )
    )

    base_model: BaseModelSource
    """The base that every replica serves. Immutable."""
    runtime: Literal["Native"] = "Native"
    """The engine."""
    replicas: int = Field(default=1, ge=0, le=64)
    """Number of engines."""
    autoscaling: Annotated[Autoscaling | None, AfterValidator(_refuse_autoscaling)] = None
    """Bounds for a changing number of engines. Not honoured yet."""
    engine: EngineSpec = EngineSpec()
    """How each engine is configured."""
    allowed_tenants: NameSet | None = None
    """Tenants who may use the pool; by default all. One name makes it a dedicated pool."""
    allowed_namespaces: NameSet | None = None
    """Namespaces whose LoRAAdapters may refer to the pool; by default all."""
    image: Image | None = None
    """Engine image; by default the chart's."""
    resources: ResourceRequirements = ResourceRequirements()
    """Resources of each engine's container."""
    pod_template: dict[str, Any] | None = None
    """Merge patch for the engines' pods; what it may set is limited by the chart's values."""


class PoolCapacity(Report):
    """Of all ready replicas together."""

    slots: int = 0
    """How many adapters of the pool's median size fit in device memory."""
    adapter_bytes: int = 0
    """Device memory that adapters may take."""
    used_bytes: int = 0
    """Device memory that adapters take."""
    host_bytes: int = 0
    """Host memory that adapters may take."""
    kv_tokens: int = 0
    """Tokens of KV cache that would fit with no adapter resident."""
    kv_tokens_displaced: int = 0
    """Tokens of KV cache that resident adapters displace."""


class PoolAdapters(Report):
    registered: int = 0
    """Adapters that name this pool."""
    ready: int = 0
    """Those that are Ready."""
    resident: int = 0
    """Those resident on at least one replica."""


class PoolStatus(Report):
    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Available, Progressing, Degraded."""
    observed_generation: int = 0
    """The metadata.generation this status describes."""
    replicas: int = 0
    """Engines that exist."""
    ready_replicas: int = 0
    """Engines that serve."""
    selector: str = ""
    """Label selector of the engines' pods, for the scale subresource."""
    capacity: PoolCapacity = PoolCapacity()
    """What fits, and what adapters cost."""
    adapters: PoolAdapters = PoolAdapters()
    """How many adapters the pool has."""
    base_digest: str | None = None
    """Digest of the base, learnt from an engine."""


class PoolMeta(ObjectMeta):
    name: Annotated[str, Field(max_length=POOL_NAME_MAX), Grammar(NAME_PATTERN, NAME_HELP)]


class BaseModelPool(Model):
    """Replicas of one base model that serve the adapters trained for it."""

    api_version: Literal["loraplane.dev/v1alpha1"] = "loraplane.dev/v1alpha1"
    kind: Literal["BaseModelPool"] = "BaseModelPool"
    metadata: PoolMeta
    spec: PoolSpec
    """What is wished."""
    status: PoolStatus = PoolStatus()
    """What was found; written by the operator only."""

    @property
    def ref(self) -> PoolRef:
        return PoolRef(self.metadata.namespace, self.metadata.name)
