"""From the resource models to the operator's words: defaults, engine options, the hash of a source."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from loraplane_core.labels import ADAPTER_KIND, ANNOTATION_EPOCH, FINALIZER, POOL_KIND
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.base import ObjectMeta
from loraplane_core.resources.pool import BaseModelPool, EngineSpec, ResourceRequirements
from loraplane_core.resources.quantity import parse_quantity
from loraplane_operator.actions import ObjectRef
from loraplane_operator.plan.conditions import from_rfc3339
from loraplane_operator.words import AdapterObject, Meta, PoolObject


def pool_object(pool: BaseModelPool, status: Mapping[str, Any]) -> PoolObject:
    spec = pool.spec
    return PoolObject(
        meta=_meta(POOL_KIND, pool.metadata),
        base_model=spec.base_model.name,
        base_uri=spec.base_model.uri,
        base_digest=spec.base_model.digest or "",
        aliases=tuple(spec.base_model.aliases),
        replicas=spec.replicas,
        engine=engine_options(spec.base_model.name, spec.engine),
        max_rank=spec.engine.max_rank,
        allowed_tenants=tuple(spec.allowed_tenants or ()),
        allowed_namespaces=tuple(spec.allowed_namespaces or ()),
        image=spec.image or "",
        resources=_resources(spec.resources),
        pod_template=json.dumps(spec.pod_template, sort_keys=True) if spec.pod_template else "",
        epoch=_epoch(pool.metadata.annotations),
        status=status,
    )


def _resources(spec: ResourceRequirements) -> tuple[tuple[str, str, str], ...]:
    groups = {"limits": spec.limits, "requests": spec.requests}
    return tuple(sorted((group, name, str(size)) for group, sizes in groups.items() for name, size in sizes.items()))


def _epoch(annotations: Mapping[str, str]) -> int | None:
    """Credentials are rotated by raising the pool's annotation; without one they are the first."""
    text = annotations.get(ANNOTATION_EPOCH, "1")
    return int(text) if re.fullmatch("[1-9][0-9]{0,8}", text) else None


def engine_options(base: str, spec: EngineSpec) -> tuple[tuple[str, str], ...]:
    """loraplane-engine's long options without dashes; sizes in bytes. What is unset stays the engine's choice."""
    sizes = {"adapter-memory": spec.adapter_memory, "host-cache": spec.host_cache, "disk-cache": spec.disk_cache}
    options: dict[str, object | None] = {
        "served-name": base,
        "dtype": spec.dtype,
        "max-model-len": spec.max_model_len,
        "max-batch-tokens": spec.max_batch_tokens,
        "max-sequences": spec.max_sequences,
        "slots": spec.slots,
        "max-rank": spec.max_rank,
        "threads": spec.threads,
        **{name: None if size is None else parse_quantity(size) for name, size in sizes.items()},
    }
    return tuple(sorted((name, str(value)) for name, value in options.items() if value is not None))


def adapter_object(adapter: LoRAAdapter, status: Mapping[str, Any]) -> AdapterObject:
    spec = adapter.spec
    shares = [share for share in spec.traffic or [] if share.weight]
    return AdapterObject(
        meta=_meta(ADAPTER_KIND, adapter.metadata),
        tenant=spec.tenant,
        adapter=adapter.adapter,
        pool=adapter.pool,
        source_uri=spec.source.uri,
        source_digest=spec.source.digest,
        source_hash=source_hash(spec.source.to_wire()),
        active_version=shares[0].version if len(shares) == 1 else spec.active_version,
        traffic=tuple(sorted((share.version, share.weight) for share in shares)) if len(shares) > 1 else (),
        warm_replicas=spec.warm_replicas,
        pinned=spec.pinned,
        deletion_policy="delete" if spec.deletion_policy == "Delete" else "retain",
        status=status,
    )


def source_hash(source: Mapping[str, Any]) -> str:
    """Part of the key by which registering is idempotent; the uid is the other."""
    return hashlib.sha256(json.dumps(source, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _meta(kind: str, metadata: ObjectMeta) -> Meta:
    deleted = metadata.deletion_timestamp
    return Meta(
        ref=ObjectRef(kind, metadata.namespace, metadata.name),
        uid=metadata.uid,
        generation=metadata.generation,
        finalized=FINALIZER in metadata.finalizers,
        created_at=from_rfc3339(metadata.creation_timestamp) if metadata.creation_timestamp else 0.0,
        deleting_since=from_rfc3339(deleted) if deleted else None,
    )
