"""The secrets of one installation: made once, each in its own 0600 file below `secrets/`."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from loraplane_cli.supervisor.files import secret_file
from loraplane_core.credentials import new_master, role_key

ADMIN_KEY_BYTES = 32


@dataclass(frozen=True)
class Material:
    """Files to hand to processes by path, and the few values that the supervisor itself needs."""

    master_file: Path
    pepper_file: Path
    admin_key_file: Path
    data_key_file: Path
    state_key_file: Path
    registry_password_file: Path
    data_password_file: Path
    admin_key: str
    registry_password: str
    data_password: str
    valkey_password: str


def load_material(folder: Path) -> Material:
    """Read the secrets in `folder` (0700), making those that do not exist yet."""
    master_file = folder / "master.key"
    master = bytes.fromhex(secret_file(master_file, lambda: new_master().hex()))
    for role in ("data", "state"):
        secret_file(folder / f"{role}-role.key", role_key(master, role).hex)
    secret_file(folder / "pepper.key", lambda: new_master().hex())
    return Material(
        master_file=master_file,
        pepper_file=folder / "pepper.key",
        admin_key_file=folder / "admin.key",
        data_key_file=folder / "data-role.key",
        state_key_file=folder / "state-role.key",
        registry_password_file=folder / "registry-password",
        data_password_file=folder / "data-password",
        admin_key=secret_file(folder / "admin.key", lambda: secrets.token_hex(ADMIN_KEY_BYTES)),
        registry_password=secret_file(folder / "registry-password", lambda: secrets.token_hex(24)),
        data_password=secret_file(folder / "data-password", lambda: secrets.token_hex(24)),
        valkey_password=secret_file(folder / "valkey-password", lambda: secrets.token_hex(24)),
    )
