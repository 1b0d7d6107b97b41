"""From a source to a version: what is accepted, refused, merged and tried again."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import BASE_DIGEST, BASE_NAME, write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import POOL, Api


@pytest.fixture
def root(settings: RegistrySettings) -> Path:
    return settings.adapter_root


@pytest.fixture
async def ready(api: Api, ingesting: None) -> Api:
    await api.tenant("acme")
    await api.pool()
    return api


async def test_a_registered_adapter_is_validated_stored_and_active(
    ready: Api, root: Path, settings: RegistrySettings
) -> None:
    write_adapter(root / "a")
    version = await ready.register("acme", "pirate", "a")
    assert (version.version, version.state, version.message) == (1, "validated", "")
    assert (version.rank, version.target_modules, version.base_evidence) == (4, ["q_proj"], "artifact")
    assert (version.base_model, version.base_digest) == (BASE_NAME, BASE_DIGEST)
    adapter = await ready.adapter("acme", "pirate")
    assert (adapter.active_version, adapter.pool) == (1, POOL)
    stored = settings.store_dir / version.digest[:2] / version.digest
    assert sorted(file.name for file in stored.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (stored / "adapter_model.safetensors").read_bytes() == (root / "a/adapter_model.safetensors").read_bytes()
    assert list((settings.store_dir / ".staging").iterdir()) == []


async def test_two_names_that_a_lossy_sanitiser_would_merge_stay_two_adapters_e13(ready: Api, root: Path) -> None:
    """E13: nothing is stored or shown under a name derived from another; bytes lie under their digest alone."""
    digests = set()
    for number, name in enumerate(["a-b", "a--b", "a-b-", "a.b", "A-b"]):
        write_adapter(root / f"x{number}", seed=number)
        if name in ("a-b", "a--b"):
            digests.add((await ready.register("acme", name, f"x{number}")).digest)
        else:
            body = {"source": {"uri": f"file:x{number}"}}
            await ready.refused(400, "invalid_name", "POST", f"/admin/tenants/acme/adapters/{name}/versions", body)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "uri",
    [
        "file:../outside",
        "file:/etc",
        "file:a/../../outside",
        "file:./a",
        "file:link",
        "file:inner/link",
        "file:",
        "file:a\\b",
        "file:a\0",
        "/etc",
        "https://example.invalid/a",
        "file:%2e%2e/outside",
    ],
)
async def test_a_path_outside_the_root_is_refused_g82_e37(ready: Api, root: Path, tmp_path: Path, uri: str) -> None:
    """G82, E37: absolute, `..` and linked paths never leave the root, whether something lies there or not."""
    write_adapter(tmp_path / "registry/outside")
    (root / "inner").mkdir()
    (root / "link").symlink_to(tmp_path / "registry/outside")
    (root / "inner/link").symlink_to("../../outside")
    body = {"source": {"uri": uri}}
    await ready.refused(422, "source_not_allowed", "POST", "/admin/tenants/acme/adapters/pirate/versions", body)
    assert (await ready.ok("GET", "/admin/tenants/acme/adapters"))["adapters"] == []


async def test_a_name_that_no_file_system_takes_is_not_found(ready: Api) -> None:
    body = {"source": {"uri": f"file:{'a' * 300}"}}
    await ready.refused(422, "source_not_found", "POST", "/admin/tenants/acme/adapters/pirate/versions", body)


def test_a_file_over_the_limit_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    from loraplane_core.artifact.preflight import Limits
    from loraplane_core.errors import ArtifactRejected
    from loraplane_gateway.registry.ingestion import sources

    folder, staging = write_adapter(tmp_path / "root/a"), tmp_path / "staging"
    staging.mkdir()
    os.truncate(folder / "adapter_model.safetensors", 1 << 40)
    with pytest.raises(ArtifactRejected) as refused:
        sources.copy_artifact(tmp_path / "root", Path("a"), staging, Limits(max_bytes=1 << 30, max_rank=8))
    assert refused.value.code == "too_large"
    assert sum(file.stat().st_size for file in staging.iterdir()) < 1 << 20


async def test_a_link_inside_the_root_may_be_followed_but_the_two_files_must_be_plain(ready: Api, root: Path) -> None:
    write_adapter(root / "real")
    (root / "alias").symlink_to("real")
    assert (await ready.register("acme", "pirate", "alias")).state == "validated"
    linked = write_adapter(root / "linked", seed=2)
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to("../real/adapter_model.safetensors")
    version = await ready.register("acme", "pirate", "linked")
    assert (version.state, version.reason) == ("rejected", "unsafe_path")


async def test_a_folder_swapped_for_a_link_after_the_check_is_not_followed_g82(tmp_path: Path) -> None:
    from loraplane_core.errors import ArtifactRejected
    from loraplane_gateway.registry.ingestion import sources

    root = tmp_path / "root"
    write_adapter(root / "a")
    write_adapter(tmp_path / "outside")
    real = sources.resolve(root, Path("a"))
    (root / "a").rename(root / "b")
    (root / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactRejected) as refused, sources._opened_below(root, real):
        pass
    assert refused.value.code == "source_not_allowed"


def _spoil_nan(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    body = bytearray(file.read_bytes())
    body[-4:] = b"\x00\x00\xc0\x7f"
    file.write_bytes(body)


def _only_a_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _fifo(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def _folder(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()


@pytest.mark.parametrize(
    ("more", "spoil", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, None, "unsupported_peft_field"),
        ({"use_dora": True}, None, "unsupported_peft_field"),
        ({"rank": 16}, None, "rank_too_high"),
        ({"hidden": 24}, None, "shape_mismatch"),
        ({"base": "other-org/other"}, None, "base_model_mismatch"),
        ({"r": 5}, None, "rank_mismatch"),
        ({}, _spoil_nan, "not_finite"),
        ({}, _only_a_pickle, "unsafe_format"),
        ({}, _fifo, "unsafe_path"),
        ({}, _folder, "unsafe_path"),
        ({}, lambda folder: os.truncate(folder / "adapter_config.json", 1 << 40), "too_large"),
        ({}, lambda folder: (folder / "adapter_config.json").unlink(), "missing_file"),
        ({}, lambda folder: (folder / "adapter_config.json").write_text("{"), "malformed_config"),
        ({}, lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 100), "malformed_weights"),
    ],
)
async def test_a_bad_artifact_is_rejected_at_registration_with_its_reason_o13_e20(
    ready: Api, root: Path, more: dict[str, Any], spoil: Callable[[Path], object] | None, reason: str
) -> None:
    """O13, E20: nothing is accepted that the first request would then fail on."""
    await ready.pool(max_rank=8)
    folder = write_adapter(root / "bad", **more)
    if spoil is not None:
        spoil(folder)
    version = await ready.register("acme", "pirate", "bad")
    assert (version.state, version.reason) == ("rejected", reason), version.message
    assert version.message
    adapter = await ready.adapter("acme", "pirate")
    assert adapter.active_version == 0
    await ready.refused(409, "not_activatable", "POST", "/admin/tenants/acme/adapters/pirate/activate", {"version": 1})


async def test_a_null_base_is_accepted_on_the_declaration_and_recorded(ready: Api, root: Path) -> None:
    write_adapter(root / "a", base=None)
    assert (await ready.register("acme", "pirate", "a", base_model=BASE_NAME)).base_evidence == "declared"


async def test_a_declared_base_that_is_not_the_pools_is_refused(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    body = {"source": {"uri": "file:a"}, "base_model": "another"}
    await ready.refused(400, "base_model_mismatch", "POST", "/admin/tenants/acme/adapters/pirate/versions", body)


async def test_a_declared_digest_is_checked(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    source = {"uri": "file:a", "digest": "0" * 64}
    version = await ready.register("acme", "pirate", "a", source=source)
    assert (version.state, version.reason) == ("rejected", "digest_mismatch")


async def test_the_same_bytes_again_are_the_same_version_and_numbers_never_come_twice(ready: Api, root: Path) -> None:
    write_adapter(root / "a", seed=1)
    write_adapter(root / "b", seed=2)
    first = await ready.register("acme", "pirate", "a")
    second = await ready.register("acme", "pirate", "b")
    again = await ready.register("acme", "pirate", "a")
    assert (first.version, second.version, again.version) == (1, 2, 1)
    assert (await ready.adapter("acme", "pirate")).active_version == 1
    third = await ready.register("acme", "pirate", "b", activate=False)
    assert third.version == 2
    await ready.ok("DELETE", "/admin/tenants/acme/adapters/pirate/versions/2")
    write_adapter(root / "c", seed=3)
    fresh = await ready.register("acme", "pirate", "c")
    assert fresh.version == 5  # 3 and 4 were the twins' own numbers
    assert [version.version for version in (await ready.adapter("acme", "pirate")).versions] == [1, 5]


async def test_two_registrations_at_once_get_two_numbers_and_one_stays_active(ready: Api, root: Path) -> None:
    for number in range(4):
        write_adapter(root / f"n{number}", seed=number)
    versions = await asyncio.gather(*(ready.register("acme", "pirate", f"n{number}") for number in range(4)))
    assert sorted(version.version for version in versions) == [1, 2, 3, 4]
    adapter = await ready.adapter("acme", "pirate")
    assert [version.weight for version in adapter.versions] == [0, 0, 0, 100]


async def test_an_idempotency_key_gives_the_same_version(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    url, body = "/admin/tenants/acme/adapters/pirate/versions", {"source": {"uri": "file:a"}}
    first, second = await asyncio.gather(
        *(ready.ok("POST", url, body, headers={"idempotency-key": "k1"}) for _ in range(2))
    )
    assert first["version"] == second["version"] == 1


async def test_versions_wait_for_the_pool_and_go_on_by_themselves(api: Api, ingesting: None, root: Path) -> None:
    write_adapter(root / "a")
    await api.tenant("acme")
    await api.pool(base_digest="", config={})
    url = "/admin/tenants/acme/adapters/pirate/versions"
    version = await api.ok("POST", url, {"source": {"uri": "file:a"}})
    assert version["state"] == "pending_base"
    await api.pool()
    adapter = await api.until("acme", "pirate", lambda found: found.active_version == 1)
    assert adapter.versions[0].state == "validated"
    await api.pool(base_digest="", config={})  # a restarted operator that has not asked an engine yet
    write_adapter(root / "b", seed=2)
    assert (await api.register("acme", "pirate", "b")).state == "validated"


async def test_a_pool_that_does_not_admit_the_tenant_is_refused(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    await ready.pool("serving/private", allowed_tenants=["other"])
    url, source = "/admin/tenants/acme/adapters/pirate/versions", {"uri": "file:a"}
    await ready.refused(403, "pool_not_allowed", "POST", url, {"source": source, "pool": "serving/private"})
    await ready.refused(404, "pool_not_found", "POST", url, {"source": source, "pool": "serving/none"})
    assert (await ready.register("acme", "pirate", "a")).state == "validated"  # the only one it may use
    await ready.pool("serving/second")
    url = "/admin/tenants/acme/adapters/other/versions"
    message = await ready.refused(400, "invalid_parameter", "POST", url, {"source": source})
    assert "serving/second, serving/tiny" in message


async def test_an_adapter_without_versions_may_choose_its_pool_anew(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    await ready.register("acme", "pirate", "a", activate=False)
    await ready.pool("serving/second")
    url, body = "/admin/tenants/acme/adapters/pirate/versions", {"source": {"uri": "file:a"}, "pool": "serving/second"}
    await ready.refused(409, "immutable_field", "POST", url, body)
    await ready.ok("DELETE", f"{url}/1")
    version = await ready.register("acme", "pirate", "a", pool="serving/second")
    assert (version.version, version.state) == (2, "validated")


async def test_an_adapter_cannot_take_the_name_of_a_base(ready: Api, root: Path) -> None:
    write_adapter(root / "a")
    url = f"/admin/tenants/acme/adapters/{BASE_NAME}/versions"
    await ready.refused(400, "reserved_name", "POST", url, {"source": {"uri": "file:a"}})


async def test_a_row_written_by_hand_is_verified_before_it_can_be_active(
    ready: Api, root: Path, database: Database
) -> None:
    folder = write_adapter(root / "by-hand")
    insert = "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model) VALUES (%s, %s, %s, %s, %s)"
    with psycopg.connect(database.owner_url, autocommit=True) as owner:
        owner.execute(insert, ("acme", 1, str(folder), 4, BASE_NAME))
        owner.execute(insert, ("acme", 2, str(folder), 8, BASE_NAME))
        owner.execute(insert, ("acme", 3, "/etc", 4, BASE_NAME))
    url = "/admin/tenants/acme/adapters/default"
    await ready.refused(409, "not_activatable", "POST", f"{url}/activate", {"version": 1})
    good = await ready.ok("POST", f"{url}/versions/1/verify?wait=20")
    assert (good["state"], good["rank"], good["is_active"], good["path"]) == ("validated", 4, False, str(folder))
    false_rank = await ready.ok("POST", f"{url}/versions/2/verify?wait=20")
    assert (false_rank["state"], false_rank["reason"]) == ("rejected", "rank_mismatch")
    outside = await ready.ok("POST", f"{url}/versions/3/verify?wait=20")
    assert (outside["state"], outside["reason"]) == ("rejected", "source_not_allowed")
    await ready.ok("POST", f"{url}/activate", {"version": 1})
    with psycopg.connect(database.owner_url) as owner:
        found = owner.execute(
            "SELECT tenant_id, path, rank FROM tenant_adapters WHERE is_active = TRUE AND base_model = %s", (BASE_NAME,)
        )
        assert found.fetchall() == [("acme", str(folder), 4)]


async def test_a_row_written_by_hand_for_another_base_is_not_validated(
    ready: Api, root: Path, database: Database
) -> None:
    folder = write_adapter(root / "by-hand", base="other-org/other")
    insert = "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model) VALUES ('acme', %s, %s, 4, %s)"
    with psycopg.connect(database.owner_url, autocommit=True) as owner:
        owner.execute(insert, (1, str(folder), "Llama-3.1-8B"))
    url = "/admin/tenants/acme/adapters/default/versions"
    await ready.refused(400, "pool_not_found", "POST", f"{url}/1/verify?wait=20")
    with psycopg.connect(database.owner_url, autocommit=True) as owner:
        owner.execute(insert, (2, str(folder), BASE_NAME))
    false_base = await ready.ok("POST", f"{url}/2/verify?wait=20")
    assert (false_base["state"], false_base["reason"]) == ("rejected", "base_model_mismatch")
