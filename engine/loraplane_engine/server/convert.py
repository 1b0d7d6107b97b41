"""Artifact to engine image in a short-lived process, so that a hostile file meets no other tenant's data."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from loraplane_core.errors import ArtifactRejected, ArtifactUnavailable, LoraplaneError, from_wire
from loraplane_core.process import die_with_parent

CONVERT_SECONDS = 60.0


async def convert(artifact: Path, out: Path, layout: str, digest: str) -> None:
    """Write the image of `artifact` to `out`. Raises ArtifactRejected with preflight's code, or ArtifactUnavailable."""
    arguments = ("--artifact", str(artifact), "--out", str(out), "--layout", layout, "--digest", digest)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplane_engine.adapters.convert", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(),
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    try:
        async with asyncio.timeout(CONVERT_SECONDS):
            output, _ = await child.communicate()
    except TimeoutError as error:
        raise ArtifactUnavailable(f"conversion took longer than {CONVERT_SECONDS:.0f} seconds") from error
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode != 0:
        raise _refusal(child.returncode, output)


def _refusal(status: int | None, output: bytes) -> LoraplaneError:
    body: Any = None
    with contextlib.suppress(ValueError):
        body = json.loads(output)
    if not isinstance(body, dict):
        return ArtifactRejected(f"conversion ended with status {status} and no reason", code="conversion_failed")
    return from_wire(int(body.get("status", 422)), body)


def _environment() -> dict[str, str]:
    keep = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
    return {name: os.environ[name] for name in keep if name in os.environ} | {"OMP_NUM_THREADS": "1"}
