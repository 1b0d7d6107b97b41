"""`.loraplane/env`: what a shell sources, and what the CLI reads when its environment says nothing."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from loraplane_core.files import write_atomic

GATEWAY_URL = "LORAPLANE_GATEWAY_URL"
ADMIN_URL = "LORAPLANE_ADMIN_URL"
ADMIN_KEY = "LORAPLANE_ADMIN_KEY"
DATABASE_URL = "LORAPLANE_DATABASE_URL"
REDIS_URL = "LORAPLANE_REDIS_URL"
KEY_PREFIX = "LORAPLANE_KEY_"

_LINE = re.compile(r"export ([A-Z_][A-Z0-9_]*)=(.*)")


def key_variable(tenant: str) -> str:
    return KEY_PREFIX + tenant.upper().replace("-", "_")


def write_env(path: Path, values: Mapping[str, str]) -> None:
    """One `export NAME=value` a line, quoted for a shell; replaced as a whole, readable by its owner only."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    write_atomic(path, "".join(lines), 0o600)


def read_env(path: Path) -> dict[str, str]:
    """The values in an env file written here; {} when there is none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    found = {}
    for match in filter(None, map(_LINE.fullmatch, text.splitlines())):
        words = shlex.split(match[2])
        found[match[1]] = words[0] if words else ""
    return found
