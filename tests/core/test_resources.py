"""The kinds people write: what is accepted, what is refused and how the refusal reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_core import labels
from loraplane_core.errors import InvalidParameter
from loraplane_core.identity import PoolRef
from loraplane_core.resources import uris
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import check_update, parse_document, parse_documents
from loraplane_core.resources.pool import BaseModelPool
from loraplane_core.resources.quantity import parse_quantity
from loraplane_core.resources.tenant import Tenant
from tests.core.resource_table import IMMUTABLE, ROWS, UPDATES, adapter, pool


@pytest.mark.parametrize("case", ROWS)
def test_the_models_agree_with_the_table(case: str) -> None:
    document, field, says, _ = ROWS[case]
    if not field:
        resource = parse_document(document)
        assert parse_document(resource.to_wire()) == resource
        return
    with pytest.raises(InvalidParameter) as caught:
        parse_document(document)
    assert caught.value.param == field
    assert f"{field}: " in caught.value.message
    assert says.casefold() in caught.value.message.casefold()


def test_the_table_is_worth_its_name() -> None:
    good = [row for row in ROWS.values() if not row.field]
    assert (len(ROWS) + len(UPDATES) >= 60, len(good) >= 10) == (True, True)
    assert all(row.says for row in ROWS.values() if row.field)


@pytest.mark.parametrize("case", UPDATES)
def test_what_may_not_change_also_not_from_unset(case: str) -> None:
    before, after, field = UPDATES[case]
    old, new = parse_document(before), parse_document(after)
    check_update(old, old)
    if not field:
        check_update(old, new)
        return
    with pytest.raises(InvalidParameter) as caught:
        check_update(old, new)
    assert (caught.value.param, caught.value.code) == (field, "immutable_field")
    assert caught.value.message == f"{field} {IMMUTABLE}"


def test_another_kind_is_another_object() -> None:
    with pytest.raises(InvalidParameter, match="kind"):
        check_update(parse_document(adapter()), parse_document(pool()))


def test_defaults_of_an_adapter() -> None:
    found = parse_document(adapter())
    assert isinstance(found, LoRAAdapter)
    assert (found.adapter, found.pool) == ("style", PoolRef("default", "smol"))
    assert (found.spec.warm_replicas, found.spec.pinned, found.spec.deletion_policy) == (1, False, "Retain")
    assert not found.owns_activation


def test_an_adapter_may_be_named_apart_from_its_object_and_live_apart_from_its_pool() -> None:
    found = parse_document(adapter({"adapter": "tone", "poolRef.namespace": "pools", "activeVersion": 2}))
    assert isinstance(found, LoRAAdapter)
    assert (found.adapter, found.pool) == ("tone", PoolRef("pools", "smol"))
    assert found.owns_activation


def test_defaults_of_a_pool() -> None:
    found = parse_document(pool())
    assert isinstance(found, BaseModelPool)
    assert (found.ref, found.spec.replicas, found.spec.runtime) == (PoolRef("default", "smol"), 1, "Native")
    assert (found.spec.engine.dtype, found.spec.engine.max_rank, found.spec.engine.adapter_memory) == ("auto", 64, None)
    assert found.spec.allowed_tenants is None


def test_nulls_in_a_pod_template_are_kept_because_a_merge_patch_deletes_with_them() -> None:
    template = {"spec": {"nodeSelector": None}}
    assert parse_document(pool({"podTemplate": template})).to_wire()["spec"]["podTemplate"] == template


TENANT = {
    "apiVersion": "loraplane.dev/v1alpha1",
    "kind": "Tenant",
    "metadata": {"name": "acme"},
    "spec": {"namespaces": ["default", "team-a"]},
}


def test_a_list_of_documents_keeps_its_order_and_passes_over_empty_ones() -> None:
    found = parse_documents([TENANT, None, pool(), adapter()])
    assert [type(resource) for resource in found] == [Tenant, BaseModelPool, LoRAAdapter]
    assert isinstance(found[0], Tenant)
    assert found[0].spec.namespaces == ["default", "team-a"]
    assert parse_documents([{key: value for key, value in TENANT.items() if key != "spec"}])


@pytest.mark.parametrize(
    ("document", "param", "words"),
    [
        ("text", "", "an object is expected"),
        ({}, "apiVersion", "loraplane.dev/v1alpha1"),
        ({**TENANT, "apiVersion": "v1"}, "apiVersion", "apiVersion must be"),
        ({**TENANT, "kind": "Pod"}, "kind", "Tenant, BaseModelPool, LoRAAdapter"),
        ({**TENANT, "kind": ["Tenant"]}, "kind", "kind must be"),
        ({**TENANT, "metadata": {}}, "metadata.name", "required"),
        ({**TENANT, "metadata": {"name": "Acme"}}, "metadata.name", "DNS label"),
        ({**TENANT, "spec": {"namespace": "x"}}, "spec.namespace", "unknown field"),
        ({**TENANT, "spec": {"namespaces": ["a", "B"]}}, "spec.namespaces[1]", "DNS label"),
        ({**adapter(), "extra": 1}, "extra", "unknown field"),
        (adapter({"poolRef": {"nmae": "x"}}), "spec.poolRef.name", "spec.poolRef.nmae: unknown field"),
        (adapter({"warm_replicas": 1}), "spec.warm_replicas", "unknown field"),
        (adapter({"source.uri": "s3://x/y"}), "spec.source.uri", "s3:// sources are not honoured yet"),
    ],
)
def test_a_refusal_names_document_and_field(document: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_documents([TENANT, document])
    assert caught.value.param == param
    assert caught.value.message.startswith("document 1")
    assert words in caught.value.message


def test_what_an_api_server_adds_is_read_and_ignored() -> None:
    document = adapter()
    document["metadata"] |= {
        "uid": "u-1",
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-11-30T00:00:00Z",
        "deletionTimestamp": "2026-11-30T00:01:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "finalizers": [labels.FINALIZER],
    }
    document["status"] = {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "fromTheFuture": 1}],
        "fromTheFuture": {"x": 1},
        "rank": 8,
    }
    found = parse_document(document)
    assert isinstance(found, LoRAAdapter)
    assert (found.metadata.uid, found.metadata.generation, found.status.rank) == ("u-1", 3, 8)
    assert found.metadata.deletion_timestamp == "2026-11-30T00:01:00Z"
    assert found.status.conditions[0].reason == "Ready"


def test_kinds_and_versions_are_those_of_labels() -> None:
    for document, kind in ((adapter(), labels.ADAPTER_KIND), (pool(), labels.POOL_KIND), (TENANT, labels.TENANT_KIND)):
        found = parse_document(document)
        assert (found.kind, found.api_version) == (kind, labels.API_VERSION)


# --- quantities ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (67108864, 67108864),
        ("64Mi", 64 << 20),
        ("2Gi", 2 << 30),
        ("1Ti", 1 << 40),
        ("3Ki", 3072),
        ("1k", 1000),
        ("1.5G", 1_500_000_000),
        ("0.1Gi", 107374183),  # rounded up
        ("5T", 5 * 10**12),
    ],
)
def test_quantities(text: str | int, size: int) -> None:
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    "text", ["", "Mi", "-1", "1 Mi", "1MB", "1e3", "0x10", "1K", "64mi", ".5Gi", "1.", "\u0661", "1\n", True]
)
def test_what_is_no_quantity(text: str | int) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_quantity(text)


# --- URIs ---


def test_E37_a_source_gives_a_path_relative_to_the_root_that_the_platform_chose() -> None:
    assert uris.source_path("file:acme/style") == "acme/style"
    assert uris.base_location("file:smollm2") == (None, "smollm2")
    assert uris.base_location("pvc://models/a/b") == ("models", "a/b")


@given(text=st.text(alphabet="ab./\\:%~ \0\n", max_size=12).map("file:".__add__))
def test_E37_no_source_ever_leaves_its_root(text: str) -> None:
    try:
        path = uris.source_path(text)
    except ValueError:
        return
    assert path
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
    assert not set(path) & set("\\%~ \0\n:")
