"""One table of good and bad objects. It runs against the models here and against a real API server with the
generated CRDs in tests/cluster: both must agree on every row."""

from typing import Any, NamedTuple

DIGEST = "0123456789abcdef" * 4
_DROP = object()


def _object(kind: str, spec: dict[str, Any], edits: dict[str, Any], name: str) -> dict[str, Any]:
    spec = dict(spec)
    for path, value in edits.items():
        *parents, last = path.split(".")
        target = spec
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        if value is _DROP:
            target.pop(last, None)
        else:
            target[last] = value
    return {
        "apiVersion": "loraplane.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def adapter(edits: dict[str, Any] | None = None, *, name: str = "style") -> dict[str, Any]:
    """A LoRAAdapter with some fields of its spec (dotted paths) set."""
    spec = {"tenant": "acme", "poolRef": {"name": "smol"}, "source": {"uri": "file:acme/style"}}
    return _object("LoRAAdapter", spec, edits or {}, name)


def pool(edits: dict[str, Any] | None = None, *, name: str = "smol") -> dict[str, Any]:
    spec = {"baseModel": {"name": "smollm2", "uri": "file:smollm2"}}
    return _object("BaseModelPool", spec, edits or {}, name)


class Row(NamedTuple):
    document: dict[str, Any]
    field: str = ""  # what a refusal names; empty = accepted


ROWS: dict[str, Row] = {
    "least adapter": Row(adapter()),
    "full adapter": Row(
        adapter(
            {
                "adapter": "tone",
                "poolRef.namespace": "pools",
                "source.digest": DIGEST,
                "activeVersion": 3,
                "warmReplicas": 0,
                "pinned": True,
                "deletionPolicy": "Delete",
            }
        )
    ),
    "null is absent": Row(adapter({"adapter": None, "warmReplicas": None, "activeVersion": None, "traffic": None})),
    "name of 63": Row(adapter(name="a" * 63)),
    "name of 64": Row(adapter(name="a" * 64), "metadata.name"),
    "name with a dot": Row(adapter(name="a.b"), "metadata.name"),
    "tenant missing": Row(adapter({"tenant": _DROP}), "spec.tenant"),
    "tenant null": Row(adapter({"tenant": None}), "spec.tenant"),
    "tenant upper case": Row(adapter({"tenant": "Acme"}), "spec.tenant"),
    "tenant a path": Row(adapter({"tenant": "../x"}), "spec.tenant"),
    "tenant empty": Row(adapter({"tenant": ""}), "spec.tenant"),
    "tenant too long": Row(adapter({"tenant": "a" * 64}), "spec.tenant"),
    "tenant no text": Row(adapter({"tenant": 7}), "spec.tenant"),
    "adapter name with underscore": Row(adapter({"adapter": "a_b"}), "spec.adapter"),
    "pool missing": Row(adapter({"poolRef": _DROP}), "spec.poolRef"),
    "pool without a name": Row(adapter({"poolRef": {"namespace": "x"}}), "spec.poolRef.name"),
    "pool namespace upper case": Row(adapter({"poolRef.namespace": "X"}), "spec.poolRef.namespace"),
    "source missing": Row(adapter({"source": _DROP}), "spec.source"),
    "source empty": Row(adapter({"source.uri": ""}), "spec.source.uri"),
    "source file of one segment": Row(adapter({"source.uri": "file:style-1.0_x@v=2+b"})),
    "source dots inside a segment": Row(adapter({"source.uri": "file:a..b/..c/d.."})),
    "source absolute": Row(adapter({"source.uri": "file:/etc/passwd"}), "spec.source.uri"),
    "source with an authority": Row(adapter({"source.uri": "file:///etc/passwd"}), "spec.source.uri"),
    "source climbing": Row(adapter({"source.uri": "file:../x"}), "spec.source.uri"),
    "source climbing inside": Row(adapter({"source.uri": "file:a/../../x"}), "spec.source.uri"),
    "source climbing at the end": Row(adapter({"source.uri": "file:a/.."}), "spec.source.uri"),
    "source the root itself": Row(adapter({"source.uri": "file:."}), "spec.source.uri"),
    "source ends in a slash": Row(adapter({"source.uri": "file:a/"}), "spec.source.uri"),
    "source with a backslash": Row(adapter({"source.uri": "file:a\\..\\b"}), "spec.source.uri"),
    "source percent-encoded": Row(adapter({"source.uri": "file:a/%2e%2e/b"}), "spec.source.uri"),
    "source with a line end": Row(adapter({"source.uri": "file:a\n"}), "spec.source.uri"),
    "source in a home": Row(adapter({"source.uri": "file:~root/x"}), "spec.source.uri"),
    "source scheme upper case": Row(adapter({"source.uri": "FILE:a"}), "spec.source.uri"),
    "source without a scheme": Row(adapter({"source.uri": "acme/style"}), "spec.source.uri"),
    "source too long": Row(adapter({"source.uri": "file:" + "a" * 1020}), "spec.source.uri"),
    "source s3": Row(adapter({"source.uri": "s3://bucket/x"}), "spec.source.uri"),
    "source hf": Row(adapter({"source.uri": "hf://org/repo@main"}), "spec.source.uri"),
    "source https": Row(adapter({"source.uri": "https://example.test/x"}), "spec.source.uri"),
    "source upload": Row(adapter({"source.uri": "upload:1"}), "spec.source.uri"),
    "source digest short": Row(adapter({"source.digest": DIGEST[:12]}), "spec.source.digest"),
    "source digest upper case": Row(adapter({"source.digest": DIGEST.upper()}), "spec.source.digest"),
    "source credentials": Row(adapter({"source.credentialsSecretRef": {"name": "x"}}), "spec.source"),
    "active version 0": Row(adapter({"activeVersion": 0}), "spec.activeVersion"),
    "active version as text": Row(adapter({"activeVersion": "1"}), "spec.activeVersion"),
    "active version a boolean": Row(adapter({"activeVersion": True}), "spec.activeVersion"),
    "traffic whole": Row(adapter({"traffic": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]})),
    "traffic with an idle version": Row(
        adapter({"traffic": [{"version": 1, "weight": 100}, {"version": 2, "weight": 0}]})
    ),
    "traffic short": Row(adapter({"traffic": [{"version": 1, "weight": 90}]}), "spec"),
    "traffic over": Row(adapter({"traffic": [{"version": 1, "weight": 60}, {"version": 2, "weight": 60}]}), "spec"),
    "traffic empty": Row(adapter({"traffic": []}), "spec.traffic"),
    "traffic negative": Row(
        adapter({"traffic": [{"version": 1, "weight": -10}, {"version": 2, "weight": 110}]}), "spec.traffic[0].weight"
    ),
    "traffic a version twice": Row(
        adapter({"traffic": [{"version": 1, "weight": 50}, {"version": 1, "weight": 50}]}), "spec"
    ),
    "traffic and active version": Row(
        adapter({"traffic": [{"version": 1, "weight": 100}], "activeVersion": 1}), "spec"
    ),
    "warm replicas negative": Row(adapter({"warmReplicas": -1}), "spec.warmReplicas"),
    "warm replicas fractional": Row(adapter({"warmReplicas": 1.5}), "spec.warmReplicas"),
    "pinned as text": Row(adapter({"pinned": "true"}), "spec.pinned"),
    "deletion policy unknown": Row(adapter({"deletionPolicy": "Orphan"}), "spec.deletionPolicy"),
    "least pool": Row(pool()),
    "full pool": Row(
        pool(
            {
                "baseModel.name": "org/Base_1.5:7b",
                "baseModel.aliases": ["org/other", "short"],
                "baseModel.uri": "pvc://models-claim/smollm2/v1",
                "baseModel.digest": DIGEST,
                "runtime": "Native",
                "replicas": 0,
                "engine": {
                    "dtype": "bfloat16",
                    "maxModelLen": 2048,
                    "maxBatchTokens": 512,
                    "maxSequences": 64,
                    "adapterMemory": "64Mi",
                    "hostCache": 268435456,
                    "diskCache": "1.5G",
                    "slots": 4,
                    "maxRank": 128,
                    "threads": 2,
                },
                "allowedTenants": ["acme"],
                "allowedNamespaces": ["default", "team-a"],
                "image": "loraplane/engine:1",
                "resources": {"limits": {"cpu": 2, "memory": "4Gi"}, "requests": {"cpu": "500m"}},
                "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": None}},
            }
        )
    ),
    "pool name of 52": Row(pool(name="a" * 52)),
    "pool name of 53": Row(pool(name="a" * 53), "metadata.name"),
    "base missing": Row(pool({"baseModel": _DROP}), "spec.baseModel"),
    "base without a name": Row(pool({"baseModel.name": _DROP}), "spec.baseModel.name"),
    "base name with a space": Row(pool({"baseModel.name": "a b"}), "spec.baseModel.name"),
    "base name ends in a colon": Row(pool({"baseModel.name": "a:"}), "spec.baseModel.name"),
    "base alias repeats the name": Row(pool({"baseModel.aliases": ["smollm2"]}), "spec.baseModel"),
    "base alias twice": Row(pool({"baseModel.aliases": ["a", "a"]}), "spec.baseModel.aliases"),
    "base alias with a space": Row(pool({"baseModel.aliases": ["a b"]}), "spec.baseModel.aliases[0]"),
    "base on the hub": Row(pool({"baseModel.uri": "hf://org/base"}), "spec.baseModel.uri"),
    "base climbing": Row(pool({"baseModel.uri": "file:../base"}), "spec.baseModel.uri"),
    "base claim climbing": Row(pool({"baseModel.uri": "pvc://claim/../base"}), "spec.baseModel.uri"),
    "base claim without a path": Row(pool({"baseModel.uri": "pvc://claim"}), "spec.baseModel.uri"),
    "base claim without a name": Row(pool({"baseModel.uri": "pvc:///base"}), "spec.baseModel.uri"),
    "runtime unknown": Row(pool({"runtime": "VLLM"}), "spec.runtime"),
    "replicas negative": Row(pool({"replicas": -1}), "spec.replicas"),
    "autoscaling": Row(pool({"autoscaling": {"min": 1, "max": 2, "targetInFlight": 8}}), "spec"),
    "engine dtype unknown": Row(pool({"engine.dtype": "int4"}), "spec.engine.dtype"),
    "engine memory with a strange unit": Row(pool({"engine.adapterMemory": "64MB"}), "spec.engine.adapterMemory"),
    "engine memory negative": Row(pool({"engine.adapterMemory": -1}), "spec.engine.adapterMemory"),
    "engine memory a boolean": Row(pool({"engine.hostCache": True}), "spec.engine.hostCache"),
    "engine slots 0": Row(pool({"engine.slots": 0}), "spec.engine.slots"),
    "allowed tenants empty": Row(pool({"allowedTenants": []}), "spec.allowedTenants"),
    "allowed tenants twice": Row(pool({"allowedTenants": ["a", "a"]}), "spec.allowedTenants"),
    "allowed tenants no name": Row(pool({"allowedTenants": ["A"]}), "spec.allowedTenants[0]"),
    "allowed namespaces empty": Row(pool({"allowedNamespaces": []}), "spec.allowedNamespaces"),
}


class Update(NamedTuple):
    before: dict[str, Any]
    after: dict[str, Any]
    field: str = ""


UPDATES: dict[str, Update] = {
    "source and the rest may change": Update(
        adapter(), adapter({"source.uri": "file:acme/style-2", "warmReplicas": 2, "pinned": True, "activeVersion": 2})
    ),
    "tenant": Update(adapter(), adapter({"tenant": "other"}), "spec.tenant"),
    "adapter": Update(adapter({"adapter": "a"}), adapter({"adapter": "b"}), "spec.adapter"),
    "adapter from unset": Update(adapter(), adapter({"adapter": "style"}), "spec.adapter"),
    "adapter to unset": Update(adapter({"adapter": "a"}), adapter(), "spec.adapter"),
    "pool": Update(adapter(), adapter({"poolRef.name": "other"}), "spec.poolRef"),
    "pool namespace from unset": Update(adapter(), adapter({"poolRef.namespace": "default"}), "spec.poolRef"),
    "replicas and engine may change": Update(pool(), pool({"replicas": 3, "engine.maxRank": 8})),
    "base name": Update(pool(), pool({"baseModel.name": "other"}), "spec.baseModel"),
    "base alias": Update(pool(), pool({"baseModel.aliases": ["other"]}), "spec.baseModel"),
    "base digest from unset": Update(pool(), pool({"baseModel.digest": DIGEST}), "spec.baseModel"),
    "the same base": Update(pool(), pool({"baseModel.aliases": []})),
}
