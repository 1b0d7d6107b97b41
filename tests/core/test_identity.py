"""Names, references and ids: one grammar, and text that reads back as what was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_core.errors import InvalidName
from loraplane_core.identity import (
    BASE_REFERENCE,
    AdapterId,
    AdapterRef,
    ModelName,
    PoolRef,
    ReplicaId,
    check_name,
    is_digest,
    is_name,
    parse_model,
)

DIGEST = "0123456789abcdef" * 4
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
versions = st.integers(1, 999_999_999)
bases = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._:/-]{0,30}[A-Za-z0-9])?", fullmatch=True)

GOOD_NAMES = ["a", "7", "acme", "a-b", "a--b", "x" * 63]
BAD_NAMES = [
    "",
    "-a",
    "a-",
    "A",
    "a_b",
    "a.b",
    "x" * 64,
    "a b",
    "a\n",
    "ä",
    "\u0663",  # a digit elsewhere
    "a\0",
]
#: What would leave a folder if a name ever became a path.
PATHS = ["..", ".", "/etc/passwd", "../../x", "a/../b", "a\\b", "%2e%2e", "a/b", "~", "C:", "a%2fb", "\\\\host\\share"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(name: str) -> None:
    assert is_name(name)
    assert check_name(name, "tenant") == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_naming_the_field(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidName) as caught:
        check_name(name, "tenant")
    assert (caught.value.param, caught.value.status) == ("tenant", 400)


@pytest.mark.parametrize("path", PATHS)
def test_G82_a_path_is_never_a_name(path: str) -> None:
    assert not is_name(path)
    for text in (f"acme/{path}@1", f"{path}/style@1"):
        with pytest.raises(InvalidName):
            AdapterRef.parse(text)
    model = parse_model(path)
    assert model is None or (is_name(model.adapter) and (model.tenant is None or is_name(model.tenant)))


@given(tenant=names, adapter=names, version=versions)
def test_E13_a_reference_reads_back_and_so_two_adapters_never_share_one(
    tenant: str, adapter: str, version: int
) -> None:
    ref = AdapterRef(tenant, adapter, version)
    assert AdapterRef.parse(str(ref)) == ref
    assert str(ref) != BASE_REFERENCE


def test_E13_names_that_a_sanitiser_would_merge_are_refused_instead() -> None:
    for name in ("a_b", "a.b", "A-b", "a/b"):
        with pytest.raises(InvalidName):
            check_name(name, "adapter")


@pytest.mark.parametrize(
    "text", ["", "acme/style", "style@1", "acme/style@0", "acme/style@01", "acme/style@-1", "acme/style@1.0",
             "acme/style@latest", "acme/style@1@2", "acme/style@1234567890", "a/b/c@1", "acme/style@1 ", BASE_REFERENCE]
)  # fmt: skip
def test_malformed_references_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        AdapterRef.parse(text)


def test_an_id_needs_a_full_digest_and_shows_twelve_digits() -> None:
    ref = AdapterRef("acme", "style", 3)
    identity = AdapterId.of(ref, DIGEST)
    assert str(identity) == "acme/style@3#0123456789ab"
    assert identity.ref == ref
    for digest in (DIGEST[:12], DIGEST.upper(), f"{DIGEST}0", ""):
        assert not is_digest(digest)
        with pytest.raises(InvalidName):
            AdapterId.of(ref, digest)


@given(namespace=names, pool=names, ordinal=st.integers(0, 999_999))
def test_pools_and_replicas_read_back(namespace: str, pool: str, ordinal: int) -> None:
    replica = ReplicaId(namespace, pool, ordinal)
    assert ReplicaId.parse(str(replica)) == replica
    assert PoolRef.parse(str(replica.pool_ref)) == PoolRef(namespace, pool)
    assert replica.pod == f"{pool}-{ordinal}"


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b/c", "a/b/-1", "a/b/01", "a/b/1/2", "A/b/1", "a/b/1\u0663"])
def test_malformed_replicas_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        ReplicaId.parse(text)


@pytest.mark.parametrize("text", ["", "a", "a/", "/a", "a/b/c", "A/b"])
def test_malformed_pools_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        PoolRef.parse(text)


@given(base=st.none() | bases, tenant=st.none() | names, adapter=names, version=st.none() | versions)
def test_a_model_name_reads_back(base: str | None, tenant: str | None, adapter: str, version: int | None) -> None:
    text = f"{base}:" if base else ""
    text += f"{tenant}/" if tenant else ""
    text += adapter
    text += f"@{version}" if version else ""
    assert parse_model(text) == ModelName(base, tenant, adapter, version)


@given(text=st.text(alphabet="ab-/:@1A.", max_size=20))
def test_whatever_a_client_sends_either_parses_into_names_or_not_at_all(text: str) -> None:
    model = parse_model(text)
    if model is not None:
        assert is_name(model.adapter)
        assert model.tenant is None or is_name(model.tenant)
        assert model.base != ""


@pytest.mark.parametrize(
    "text", ["", ":", ":style", "/style", "style@", "style@0", "style@x", "org/base:", "Acme/style", "a/b/c", "Style"]
)
def test_what_cannot_name_an_adapter(text: str) -> None:
    assert parse_model(text) is None


def test_the_base_is_split_at_the_last_colon() -> None:
    assert parse_model("org/base:7b:acme/style@2") == ModelName("org/base:7b", "acme", "style", 2)
