"""Runs blocks as a person would type them: in order, in one shell, in a folder that looks like the checkout."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.docs.blocks import ROOT, Block

#: Not linked into the copy of the checkout: what the blocks make there is theirs.
_OWN = frozenset({".loraplane", ".git", ".cache", "examples"})
END_SECONDS = 15.0


class Failed(Exception):
    """Which block, and what it printed."""


def checkout(folder: Path, change_pool: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A folder in which every relative path of the documents is right, and `.loraplane` is new.

    The examples' pools are what `change_pool` makes of them: as much as the machine of a test has room for.
    """
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in _OWN:
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "examples", folder / "examples")  # a folder of YAML is read without following links
    for file in (folder / "examples" / "pools").glob("*.yaml"):
        file.write_text(yaml.safe_dump(change_pool(yaml.safe_load(file.read_text()))))
    (folder / ".loraplane").mkdir(mode=0o700)
    (folder / ".loraplane" / "models").symlink_to(ROOT / ".loraplane" / "models")
    return folder


def run(
    blocks: Iterable[Block], folder: Path, out: Path, env: Mapping[str, str], seconds: float, changes: Mapping[str, str]
) -> dict[Block, str]:
    """What each printed. Raises Failed at the first that ends with another status than 0, and at the deadline.

    `changes` are made in the text: what must be another here, such as a port that is taken. What a block left
    running is ended.
    """
    out.mkdir()
    chosen = list(blocks)
    script = out / "script"
    script.write_text("".join(_parts(chosen, out, changes)))
    shell = subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(out), "LC_ALL": "C.UTF-8", **env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = shell.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        _end(shell)
    printed = {block: _printed(out, number) for number, block in enumerate(chosen) if _file(out, number).exists()}
    if status != 0:
        last = list(printed)[-1]
        how = f"ended with {status}" if status > 0 else f"took longer than {seconds:g} s"
        raise Failed(f"{last} {how}:\n{last.text}---\n{printed[last]}")
    return printed


def _parts(blocks: list[Block], out: Path, changes: Mapping[str, str]) -> Iterable[str]:
    yield "set -euo pipefail\n"
    for number, block in enumerate(blocks):
        text = block.text
        for old, new in changes.items():
            text = text.replace(old, new)
        file = shlex.quote(str(_file(out, number)))
        if not block.until:
            yield f"{{\n{text}}} > {file} 2>&1\n"
            continue
        yield f"( {text} ) > {file} 2>&1 &\nbackground=$!\n"
        wanted = shlex.quote(block.until)
        yield f"until grep -qF {wanted} {file}; do\n  kill -0 $background 2>/dev/null\n  sleep 0.1\ndone\n"


def _file(out: Path, number: int) -> Path:
    return out / f"{number:02}"


def _printed(out: Path, number: int) -> str:
    return _file(out, number).read_text(errors="replace")


def _end(shell: "subprocess.Popen[bytes]") -> None:
    """The whole session, with what was left in the background; by force what does not end by itself."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signum)
        shell.wait(timeout=END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while _alive(shell.pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def _alive(session: int) -> bool:
    """Whether a process of it runs; one that has ended and that nobody has asked after does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, leader = stat.read_text().rpartition(")")[2].split()[:4]
            if int(leader) == session and state != "Z":
                return True
    return False
