"""One table of good and bad objects. It runs against the models here and against a real API server with the
generated CRDs in tests/cluster: both must agree on every row, and each refusal must tell a person what to change."""

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


def _with_metadata(document: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**document, "metadata": {**document["metadata"], **more}}


def _shares(count: int) -> list[dict[str, int]]:
    return [{"version": number, "weight": 100 if number == 1 else 0} for number in range(1, count + 1)]


class Row(NamedTuple):
    document: dict[str, Any]
    field: str = ""  # what a refusal names; empty = accepted
    says: str = ""  # part of the refusal
    server: str = ""  # part of the API server's, where it uses its own words


#: (the models' words, the API server's)
_MISSING = ("Field required", "Required value")
_NO_TEXT = ("valid string", "must be of type string")
_NO_INTEGER = ("valid integer", "must be of type integer")
_NO_BOOLEAN = ("valid boolean", "must be of type boolean")
_TWICE = ("twice (duplicate)", "Duplicate value")
_NAME = ("must be a DNS label: lower-case letters, digits and '-'",)
_PATH = ("must be file:PATH with a relative path without '.', '..', backslashes or unusual characters",)
_BASE_PATH = ("must be file:PATH or pvc://CLAIM/PATH with a relative path",)
_BASE_NAME = ("must be letters, digits and . _ : / -, with a letter or digit at both ends",)
_DIGEST = ("must be 64 lower-case hexadecimal digits",)
_MEMORY = ('must be an amount of memory such as "64Mi", "2Gi" or a whole number of bytes',)
_AMOUNT = ('must be an amount such as "500m", 2 or "4Gi"',)


def _too_long(longest: int) -> tuple[str, str]:
    return f"at most {longest} characters", f"Too long: may not be more than {longest}"


def _one_of(*values: str) -> tuple[str, str]:
    quoted = [f"'{value}'" for value in values]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted), ", ".join(
        f'"{value}"' for value in values
    )


def _not_yet(scheme: str, noun: str) -> tuple[str]:
    return (f"{scheme} {noun} are not honoured yet; use file:PATH below the",)


def _unknown(field: str) -> tuple[str, str]:
    return f"{field}: unknown field", f'unknown field "{field}"'


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
    "largest adapter": Row(  # the rules' costs have a limit per object
        adapter(
            {
                "tenant": "a" * 63,
                "adapter": "b" * 63,
                "poolRef": {"name": "c" * 63, "namespace": "d" * 63},
                "source": {"uri": "file:" + "e/" * 509 + "e", "digest": DIGEST},
                "traffic": _shares(16),
            },
            name="f" * 63,
        )
    ),
    "null is absent": Row(
        adapter(dict.fromkeys(("adapter", "warmReplicas", "activeVersion", "traffic", "source.digest")))
    ),
    "null in a label": Row(_with_metadata(adapter(), labels={"a": None, "b": "c"})),
    "unknown field at the top": Row({**adapter(), "extra": 1}, "extra", *_unknown("extra")),
    "unknown field of the spec": Row(
        adapter({"warm_replicas": 1}), "spec.warm_replicas", *_unknown("spec.warm_replicas")
    ),
    "unknown field deep inside": Row(
        adapter({"poolRef.nmae": "x"}), "spec.poolRef.nmae", *_unknown("spec.poolRef.nmae")
    ),
    "no spec": Row({**adapter(), "spec": None}, "spec", *_MISSING),
    "spec a list": Row({**adapter(), "spec": []}, "spec", "valid dictionary", "must be of type object"),
    "name of 63": Row(adapter(name="a" * 63)),
    "name of digits": Row(adapter(name="007")),
    "name of 64": Row(adapter(name="a" * 64), "metadata.name", "at most 63 characters"),
    "name with a dot": Row(adapter(name="a.b"), "metadata.name", *_NAME),
    "name upper case": Row(adapter(name="Style"), "metadata.name", *_NAME, "lower case alphanumeric"),
    "tenant missing": Row(adapter({"tenant": _DROP}), "spec.tenant", *_MISSING),
    "tenant null": Row(adapter({"tenant": None}), "spec.tenant", *_MISSING),
    "tenant upper case": Row(adapter({"tenant": "Acme"}), "spec.tenant", *_NAME),
    "tenant a path": Row(adapter({"tenant": "../x"}), "spec.tenant", *_NAME),
    "tenant empty": Row(adapter({"tenant": ""}), "spec.tenant", *_NAME),
    "tenant with a line end": Row(adapter({"tenant": "acme\n"}), "spec.tenant", *_NAME),
    "tenant with a digit of another script": Row(adapter({"tenant": "acme\u0661"}), "spec.tenant", *_NAME),
    "tenant of 63 characters in more bytes": Row(adapter({"tenant": "\u00e9" * 63}), "spec.tenant", *_NAME),
    "tenant too long": Row(adapter({"tenant": "a" * 64}), "spec.tenant", *_too_long(63)),
    "tenant no text": Row(adapter({"tenant": 7}), "spec.tenant", *_NO_TEXT),
    "adapter name with underscore": Row(adapter({"adapter": "a_b"}), "spec.adapter", *_NAME),
    "adapter name ends in a dash": Row(adapter({"adapter": "a-"}), "spec.adapter", *_NAME),
    "pool missing": Row(adapter({"poolRef": _DROP}), "spec.poolRef", *_MISSING),
    "pool without a name": Row(adapter({"poolRef": {"namespace": "x"}}), "spec.poolRef.name", *_MISSING),
    "pool namespace upper case": Row(adapter({"poolRef.namespace": "X"}), "spec.poolRef.namespace", *_NAME),
    "source missing": Row(adapter({"source": _DROP}), "spec.source", *_MISSING),
    "source without a URI": Row(adapter({"source.uri": _DROP}), "spec.source.uri", *_MISSING),
    "source file of one segment": Row(adapter({"source.uri": "file:style-1.0_x@v=2+b"})),
    "source dots inside a segment": Row(adapter({"source.uri": "file:a..b/..c/d.."})),
    **{
        f"source {case}": Row(adapter({"source.uri": uri}), "spec.source.uri", *_PATH)
        for case, uri in {
            "empty": "",
            "absolute": "file:/etc/passwd",
            "with an authority": "file:///etc/passwd",
            "climbing": "file:../x",
            "climbing inside": "file:a/../../x",
            "climbing at the end": "file:a/..",
            "the root itself": "file:.",
            "ends in a slash": "file:a/",
            "with a backslash": "file:a\\..\\b",
            "percent-encoded": "file:a/%2e%2e/b",
            "with a line end": "file:a\n",
            "in a home": "file:~root/x",
            "scheme upper case": "FILE:a",
            "without a scheme": "acme/style",
            "upload": "upload:1",
        }.items()
    },
    "source too long": Row(adapter({"source.uri": "file:" + "a" * 1020}), "spec.source.uri", *_too_long(1024)),
    "source s3": Row(adapter({"source.uri": "s3://bucket/x"}), "spec.source.uri", *_not_yet("s3://", "sources")),
    "source hf": Row(adapter({"source.uri": "hf://org/repo@main"}), "spec.source.uri", *_not_yet("hf://", "sources")),
    "source https": Row(
        adapter({"source.uri": "https://example.test/x"}), "spec.source.uri", *_not_yet("https://", "sources")
    ),
    "source digest short": Row(adapter({"source.digest": DIGEST[:12]}), "spec.source.digest", *_DIGEST),
    "source digest upper case": Row(adapter({"source.digest": DIGEST.upper()}), "spec.source.digest", *_DIGEST),
    "source credentials": Row(
        adapter({"source.credentialsSecretRef": {"name": "x"}}),
        "spec.source.credentialsSecretRef",
        "credentialsSecretRef is not honoured yet; leave it out",
    ),
    "active version 0": Row(adapter({"activeVersion": 0}), "spec.activeVersion", "greater than or equal to 1"),
    "active version of ten digits": Row(
        adapter({"activeVersion": 10**9}), "spec.activeVersion", "less than or equal to"
    ),
    "active version as text": Row(adapter({"activeVersion": "1"}), "spec.activeVersion", *_NO_INTEGER),
    "active version a boolean": Row(adapter({"activeVersion": True}), "spec.activeVersion", *_NO_INTEGER),
    "traffic whole": Row(adapter({"traffic": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]})),
    "traffic with an idle version": Row(
        adapter({"traffic": [{"version": 1, "weight": 100}, {"version": 2, "weight": 0}]})
    ),
    "traffic of 16": Row(adapter({"traffic": _shares(16)})),
    "traffic of 17": Row(
        adapter({"traffic": _shares(17)}), "spec.traffic", "at most 16 items", "Too many: 17: must have at most 16"
    ),
    "traffic short": Row(
        adapter({"traffic": [{"version": 1, "weight": 90}]}), "spec.traffic", "the weights must sum to 100"
    ),
    "traffic over": Row(
        adapter({"traffic": [{"version": 1, "weight": 60}, {"version": 2, "weight": 60}]}),
        "spec.traffic",
        "the weights must sum to 100",
    ),
    "traffic empty": Row(adapter({"traffic": []}), "spec.traffic", "at least 1 item"),
    "traffic negative": Row(
        adapter({"traffic": [{"version": 1, "weight": -10}, {"version": 2, "weight": 110}]}),
        "spec.traffic[0].weight",
        "greater than or equal to 0",
    ),
    "traffic without a version": Row(adapter({"traffic": [{"weight": 100}]}), "spec.traffic[0].version", *_MISSING),
    "traffic a version twice": Row(
        adapter({"traffic": [{"version": 1, "weight": 50}, {"version": 1, "weight": 50}]}), "spec.traffic", *_TWICE
    ),
    "traffic and active version": Row(
        adapter({"traffic": [{"version": 1, "weight": 100}], "activeVersion": 1}),
        "spec",
        "activeVersion and traffic exclude each other; keep one of them",
    ),
    "warm replicas negative": Row(adapter({"warmReplicas": -1}), "spec.warmReplicas", "greater than or equal to 0"),
    "O10 more warm replicas than a pool can have": Row(
        adapter({"warmReplicas": 65}), "spec.warmReplicas", "less than or equal to 64"
    ),
    "warm replicas fractional": Row(adapter({"warmReplicas": 1.5}), "spec.warmReplicas", *_NO_INTEGER),
    "warm replicas whole, written with a point": Row(adapter({"warmReplicas": 2.0})),
    "pinned as text": Row(adapter({"pinned": "true"}), "spec.pinned", *_NO_BOOLEAN),
    "deletion policy unknown": Row(
        adapter({"deletionPolicy": "Orphan"}), "spec.deletionPolicy", *_one_of("Retain", "Delete")
    ),
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
                "image": "example.test:5000/loraplane/engine:1@sha256:" + DIGEST,
                "resources": {"limits": {"cpu": 2, "memory": "4Gi"}, "requests": {"cpu": "500m"}},
                "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": None}},
            }
        )
    ),
    "largest pool": Row(
        pool(
            {
                "baseModel": {
                    "name": "a" * 128,
                    "aliases": [f"{number:0128}" for number in range(16)],
                    "uri": f"pvc://{'b.' * 126}b/" + "c" * 764,
                    "digest": DIGEST,
                },
                "engine": dict.fromkeys(("adapterMemory", "hostCache", "diskCache"), "9" * 18 + ".999999999Ti"),
                "allowedTenants": [f"{number:063}" for number in range(256)],
                "allowedNamespaces": [f"{number:063}" for number in range(256)],
                "image": "d" * 512,
                "resources": {"limits": {f"e{number}": "1.5Gi" for number in range(16)}},
            },
            name="f" * 52,
        )
    ),
    "pool with nulls": Row(pool({"engine": None, "baseModel.aliases": None, "resources.limits": {"cpu": None}})),
    "pool name of 52": Row(pool(name="a" * 52)),
    "pool name of 53": Row(pool(name="a" * 53), "metadata.name", "at most 52 characters"),
    "base missing": Row(pool({"baseModel": _DROP}), "spec.baseModel", *_MISSING),
    "base without a name": Row(pool({"baseModel.name": _DROP}), "spec.baseModel.name", *_MISSING),
    "base name with a space": Row(pool({"baseModel.name": "a b"}), "spec.baseModel.name", *_BASE_NAME),
    "base name ends in a colon": Row(pool({"baseModel.name": "a:"}), "spec.baseModel.name", *_BASE_NAME),
    "base name too long": Row(pool({"baseModel.name": "a" * 129}), "spec.baseModel.name", *_too_long(128)),
    "base alias repeats the name": Row(
        pool({"baseModel.aliases": ["smollm2"]}), "spec.baseModel", "aliases must not repeat the base's name"
    ),
    "base alias twice": Row(pool({"baseModel.aliases": ["a", "a"]}), "spec.baseModel.aliases", *_TWICE),
    "base alias with a space": Row(pool({"baseModel.aliases": ["a b"]}), "spec.baseModel.aliases[0]", *_BASE_NAME),
    "base alias null": Row(pool({"baseModel.aliases": [None]}), "spec.baseModel.aliases[0]", *_NO_TEXT),
    **{
        f"base on {scheme}": Row(pool({"baseModel.uri": uri}), "spec.baseModel.uri", *_not_yet(scheme, "bases"))
        for scheme, uri in {"s3://": "s3://a/b", "hf://": "hf://org/base", "https://": "https://a/b"}.items()
    },
    "base on a claim": Row(pool({"baseModel.uri": "pvc://models.v1/a/b"})),
    **{
        f"base {case}": Row(pool({"baseModel.uri": uri}), "spec.baseModel.uri", *_BASE_PATH)
        for case, uri in {
            "climbing": "file:../base",
            "claim climbing": "pvc://claim/../base",
            "claim without a path": "pvc://claim",
            "claim without a name": "pvc:///base",
            "claim with two dots": "pvc://a..b/base",
        }.items()
    },
    "base digest short": Row(pool({"baseModel.digest": "0" * 63}), "spec.baseModel.digest", *_DIGEST),
    "runtime unknown": Row(pool({"runtime": "VLLM"}), "spec.runtime", *_one_of("Native")),
    "replicas negative": Row(pool({"replicas": -1}), "spec.replicas", "greater than or equal to 0"),
    "replicas too many": Row(pool({"replicas": 65}), "spec.replicas", "less than or equal to 64"),
    "autoscaling": Row(
        pool({"autoscaling": {"min": 1, "max": 2, "targetInFlight": 8}}),
        "spec.autoscaling",
        "autoscaling is not honoured yet; set replicas",
    ),
    "engine dtype unknown": Row(
        pool({"engine.dtype": "int4"}), "spec.engine.dtype", *_one_of("auto", "float32", "bfloat16", "float16")
    ),
    "engine memory with a point": Row(pool({"engine.adapterMemory": "0.5Gi"})),
    **{
        f"engine memory {case}": Row(pool({"engine.adapterMemory": amount}), "spec.engine.adapterMemory", *_MEMORY)
        for case, amount in {
            "with a strange unit": "64MB",
            "negative": -1,
            "negative as text": "-1Gi",
            "empty": "",
            "in thousandths": "100m",
            "beyond all bounds": 10**18,
            "whole, written with a point": 64.0,
        }.items()
    },
    "engine memory fractional": Row(
        pool({"engine.adapterMemory": 1.5}),
        "spec.engine.adapterMemory",
        *_MEMORY,
        "must be of type integer,string",
    ),
    "engine memory a boolean": Row(
        pool({"engine.hostCache": True}), "spec.engine.hostCache", *_MEMORY, "must be of type integer,string"
    ),
    "engine slots 0": Row(pool({"engine.slots": 0}), "spec.engine.slots", "greater than or equal to 1"),
    "engine rank too high": Row(pool({"engine.maxRank": 2048}), "spec.engine.maxRank", "less than or equal to 1024"),
    "allowed tenants empty": Row(pool({"allowedTenants": []}), "spec.allowedTenants", "at least 1 item"),
    "allowed tenants twice": Row(pool({"allowedTenants": ["a", "a"]}), "spec.allowedTenants", *_TWICE),
    "allowed tenants no name": Row(pool({"allowedTenants": ["A"]}), "spec.allowedTenants[0]", *_NAME),
    "allowed namespaces empty": Row(pool({"allowedNamespaces": []}), "spec.allowedNamespaces", "at least 1 item"),
    "image with a space": Row(pool({"image": "a b"}), "spec.image", "must be a container image such as"),
    "image empty": Row(pool({"image": ""}), "spec.image", "must be a container image such as"),
    "resources no amount": Row(
        pool({"resources.limits": {"memory": "4 GB"}}), "spec.resources.limits.memory", *_AMOUNT
    ),
    "resources negative": Row(pool({"resources.requests": {"cpu": -1}}), "spec.resources.requests.cpu", *_AMOUNT),
    "resources of 17 kinds": Row(
        pool({"resources.limits": {f"a{number}": 1 for number in range(17)}}),
        "spec.resources.limits",
        "at most 16 items",
        "must have at most 16 items",
    ),
    "pod template a text": Row(
        pool({"podTemplate": "x"}), "spec.podTemplate", "valid dictionary", "must be of type object"
    ),
}


class Update(NamedTuple):
    before: dict[str, Any]
    after: dict[str, Any]
    field: str = ""  # what a refusal names; it says IMMUTABLE


IMMUTABLE = "is immutable, also from unset; delete the object and create another"


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
    "base alias in another order": Update(
        pool({"baseModel.aliases": ["a", "b"]}), pool({"baseModel.aliases": ["b", "a"]})
    ),
    "base alias fewer": Update(
        pool({"baseModel.aliases": ["a", "b"]}), pool({"baseModel.aliases": ["a"]}), "spec.baseModel"
    ),
    "traffic for an active version": Update(
        adapter({"activeVersion": 1}), adapter({"traffic": [{"version": 1, "weight": 100}]})
    ),
    "active version to unset": Update(adapter({"activeVersion": 1}), adapter()),
    "pool namespace to unset": Update(adapter({"poolRef.namespace": "default"}), adapter(), "spec.poolRef"),
    "base URI": Update(pool(), pool({"baseModel.uri": "file:smollm2-b"}), "spec.baseModel"),
    "the same base": Update(pool(), pool({"baseModel.aliases": []})),
}
