"""`tenant`, `key`, `adapter` and `rollback` against the registry's REST, mocked at the HTTP level."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplane_cli.app import ANYWHERE, HERE
from loraplane_core.wire.registry import Activate, Rollback
from tests.cli.registry_fake import Command, Registry, install

ADAPTER = "/admin/tenants/acme/adapters/pirate"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return install(monkeypatch)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def version(number: int, **fields: Any) -> dict[str, Any]:
    return {"tenant": "acme", "adapter": "pirate", "version": number, "state": "validated"} | fields


def adapter(active: int, *versions: dict[str, Any]) -> dict[str, Any]:
    return {"tenant": "acme", "adapter": "pirate", "active_version": active, "versions": list(versions)}


def refusal(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def test_tenant_create_names_the_namespaces(registry: Registry, command: Command) -> None:
    made = {"name": "acme", "namespaces": ["a", "b"], "created_at": "2026-11-30T00:00:00Z"}
    registry.on("POST", "/admin/tenants", 201, made)
    assert command.json("tenant", "create", "acme", "-n", "a", "-n", "b") == made
    assert registry.bodies() == [{"name": "acme", "namespaces": ["a", "b"]}]
    assert registry.asked[0].headers["authorization"] == "Bearer platform"


def test_a_bad_name_is_refused_before_anybody_is_asked(registry: Registry, command: Command) -> None:
    assert command.run("tenant", "create", "No_Good") == 1
    assert registry.asked == []


def test_tenants_are_listed_as_a_table_and_as_json(registry: Registry, command: Command) -> None:
    tenant = {"name": "acme", "namespaces": ["a"], "created_at": "2026-11-30T00:00:00Z"}
    registry.on("GET", "/admin/tenants", 200, {"tenants": [tenant]})
    assert command.json("tenant", "list") == {"items": [tenant]}
    assert command.run("tenant", "list") == 0
    assert command.output.splitlines()[0].split() == ["NAME", "NAMESPACES", "AGE"]
    assert command.output.splitlines()[1].split()[:2] == ["acme", "a"]
    assert command.run("get", "tenants", "acme") == 0
    assert command.run("get", "tenants", "nobody") == 1


def test_a_new_key_is_printed_alone_so_that_a_script_can_take_it(registry: Registry, command: Command) -> None:
    key = {"id": "k1", "tenant": "acme", "name": "ci", "scopes": ["admin"], "created_at": "2026-11-30T00:00:00Z"}
    registry.on("POST", "/admin/tenants/acme/keys", 201, {"key": key, "secret": "lp_secret"})
    assert command.run("key", "create", "acme", "--name", "ci", "--scope", "admin") == 0
    assert command.output == "lp_secret\n"
    assert registry.bodies() == [{"name": "ci", "scopes": ["admin"], "expires_at": None}]


def test_keys_are_listed_and_revoked(registry: Registry, command: Command) -> None:
    key = {"id": "k1", "tenant": "acme", "name": "", "scopes": ["inference"], "created_at": "", "revoked_at": "x"}
    registry.on("GET", "/admin/tenants/acme/keys", 200, {"keys": [key]})
    registry.on("DELETE", "/admin/tenants/acme/keys/k1", 200, {})
    assert command.run("key", "list", "acme") == 0
    assert "revoked" in command.output
    assert command.json("key", "revoke", "acme", "k1") == {"revoked": "k1"}


def test_register_waits_and_a_rejected_version_is_no_success(registry: Registry, command: Command) -> None:
    rejected = version(1, state="rejected", reason="rank_too_high", message="rank 128 is over 64")
    registry.on("POST", f"{ADAPTER}/versions", 200, rejected)
    assert command.run("adapter", "register", "acme/pirate", "file:pirate", "--pool", "default/smol") == 1
    assert "rank_too_high: rank 128 is over 64" in command.output
    assert registry.asked[0].url.params["wait"] == "60"
    assert registry.bodies()[0]["source"] == {"uri": "file:pirate", "digest": None}
    assert registry.bodies()[0]["pool"] == "default/smol"


def test_a_version_still_in_work_after_the_wait_has_its_own_exit_status(registry: Registry, command: Command) -> None:
    registry.on("POST", f"{ADAPTER}/versions", 200, version(1, state="pending_base"))
    assert command.run("adapter", "register", "acme/pirate", "file:pirate", "--wait", "1") == 7
    assert command.run("adapter", "register", "acme/pirate", "file:pirate", "--wait", "0") == 0


def test_upload_sends_both_files_in_parts_and_registers_the_upload(
    registry: Registry, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplane_cli.admin.UPLOAD_CHUNK", 4)
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0123456789")
    registry.on("POST", "/admin/tenants/acme/uploads", 201, {"id": "u1"})
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        registry.on("PUT", f"/admin/tenants/acme/uploads/u1/files/{name}", 200, {"id": "u1"})
    registry.on("POST", f"{ADAPTER}/versions", 200, version(2, is_active=True))
    assert command.json("adapter", "upload", "acme/pirate", str(tmp_path))["version"] == 2
    puts = [request for request in registry.asked if request.method == "PUT"]
    parts = [(put.url.path[-11:], put.headers["upload-offset"], put.content) for put in puts]
    assert parts == [
        ("config.json", "0", b"{}"),
        ("safetensors", "0", b"0123"),
        ("safetensors", "4", b"4567"),
        ("safetensors", "8", b"89"),
    ]
    assert '"uri":"upload:u1"' in registry.asked[-1].content.decode()


def test_upload_of_a_folder_without_the_files_says_which(registry: Registry, command: Command, tmp_path: Path) -> None:
    assert command.run("adapter", "upload", "acme/pirate", str(tmp_path)) == 1
    assert registry.asked == []


def test_activate_verify_delete_and_rollback_name_the_version(registry: Registry, command: Command) -> None:
    registry.on("POST", f"{ADAPTER}/activate", 200, adapter(3))
    registry.on("POST", f"{ADAPTER}/rollback", 200, adapter(2))
    registry.on("POST", f"{ADAPTER}/versions/4/verify", 200, version(4))
    registry.on("DELETE", f"{ADAPTER}/versions/1", 200, {})
    assert command.json("adapter", "activate", "acme/pirate@3", "--expect-active", "2")["active_version"] == 3
    assert command.json("rollback", "acme/pirate")["active_version"] == 2
    assert command.json("rollback", "acme/pirate", "--to", "2")["active_version"] == 2
    assert command.json("adapter", "verify", "acme/pirate@4")["version"] == 4
    assert command.json("adapter", "delete", "acme/pirate@1") == {"deleted": "acme/pirate@1"}
    activated, rolled_back, rolled_to = registry.bodies()
    assert msgspec.convert(activated, Activate) == Activate(version=3, expect_active=2)
    assert [msgspec.convert(body, Rollback) for body in (rolled_back, rolled_to)] == [Rollback(), Rollback(version=2)]


def test_shares_are_set_together_and_shown(registry: Registry, command: Command) -> None:
    split = adapter(3, version(3, weight=90, is_active=True), version(4, weight=10, is_active=True), version(5))
    registry.on("POST", f"{ADAPTER}/traffic", 200, split)
    registry.on("GET", ADAPTER, 200, split)
    assert command.run("traffic", "acme/pirate", "3=90", "4=10", "--expect", "3=100") == 0
    assert command.output.strip() == "acme/pirate: @3 90%, @4 10%"
    assert registry.bodies() == [
        {
            "shares": [{"version": 3, "weight": 90}, {"version": 4, "weight": 10}],
            "expect": [{"version": 3, "weight": 100}],
        }
    ]
    assert command.run("traffic", "acme/pirate") == 0
    assert [line.split() for line in command.output.splitlines()[1:]] == [["3", "90%"], ["4", "10%"]]
    assert command.run("adapter", "show", "acme/pirate") == 0
    assert "90%" in command.output
    asked = len(registry.asked)
    for wrong in ("3", "3=x", "=5", "@3=100"):
        assert command.run("traffic", "acme/pirate", wrong) == 1
    assert len(registry.asked) == asked


def test_activation_and_rollback_may_wait_for_warmth(registry: Registry, command: Command) -> None:
    registry.on("POST", f"{ADAPTER}/activate", 504, refusal("not_warm", "version 2 keeps serving"))
    registry.on("POST", f"{ADAPTER}/rollback", 200, adapter(2))
    assert command.run("adapter", "activate", "acme/pirate@3", "--wait", "warm", "--deadline", "5") == 1
    assert command.json("rollback", "acme/pirate", "--wait", "warm")["active_version"] == 2
    activated, rolled_back = registry.bodies()
    assert msgspec.convert(activated, Activate) == Activate(version=3, wait="warm", deadline_s=5)
    assert msgspec.convert(rolled_back, Rollback) == Rollback(wait="warm")


def test_show_lists_every_version(registry: Registry, command: Command) -> None:
    registry.on("GET", ADAPTER, 200, adapter(2, version(1, rank=8, bytes=2048), version(2, is_active=True)))
    assert command.run("adapter", "show", "acme/pirate") == 0
    lines = [line.split() for line in command.output.splitlines()]
    assert lines[2][:4] == ["1", "validated", "8", "2"]
    assert lines[3][:3] == ["2", "validated", "active"]


@pytest.mark.parametrize(
    ("status", "code"), [(409, "managed_by_object"), (404, "tenant_unknown"), (503, "unavailable")]
)
def test_a_refusal_is_shown_with_its_code_and_ends_the_command(
    registry: Registry, command: Command, capsys: pytest.CaptureFixture[str], status: int, code: str
) -> None:
    registry.on("POST", f"{ADAPTER}/rollback", status, refusal(code, "because"))
    assert command.run("rollback", "acme/pirate") == 1
    assert f"{code}: because" in capsys.readouterr().err
    assert command.run("rollback", "acme/pirate", "--json") == 1
    assert f'"code": "{code}"' in capsys.readouterr().out


def test_a_registry_that_does_not_answer_has_an_exit_status_of_its_own(
    registry: Registry, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: httpx.Request) -> tuple[int, Any]:
        raise httpx.ConnectError("connection refused", request=request)

    registry.answers["GET", "/admin/tenants"] = refuse
    assert command.run("tenant", "list") == 4
    assert "kubectl port-forward svc/loraplane-registry 8001" in capsys.readouterr().err


def test_a_wrong_admin_key_is_told_with_where_the_right_one_is(
    registry: Registry, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.on("GET", "/admin/tenants", 401, refusal("invalid_api_key", "the credential is not valid"))
    assert command.run("tenant", "list") == 1
    told = capsys.readouterr().err
    assert "invalid_api_key: http://registry.test does not take the key in LORAPLANE_ADMIN_KEY" in told
    assert "Secret loraplane-keys" in told


def test_help_tells_what_is_for_this_machine_only(command: Command) -> None:
    assert command.run("--help") == 0
    where = [command.output.index(text) for text in (HERE, "│ up ", "│ get ", ANYWHERE, "│ rollback ", "│ tenant ")]
    assert where == sorted(where)


def test_without_environment_and_env_file_the_command_says_what_is_missing(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LORAPLANE_ADMIN_URL", "LORAPLANE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert command.run("tenant", "list") == 4
    told = capsys.readouterr().err
    assert "LORAPLANE_ADMIN_URL and LORAPLANE_ADMIN_KEY not set" in told
    assert "`loraplane up`" in told and "docs/install.md" in told
    monkeypatch.setenv("LORAPLANE_ADMIN_URL", "http://registry.test")
    assert command.run("tenant", "list") == 4
    assert "error: not_configured: LORAPLANE_ADMIN_KEY not set" in capsys.readouterr().err
