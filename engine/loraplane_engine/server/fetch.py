"""Artifacts by digest from the registry's artifact listener: bounded, with deadlines, never trusted."""

import hashlib
from pathlib import Path
from typing import Any

import httpx

from loraplane_core import headers as names
from loraplane_core.artifact.digest import ARTIFACT_FILES, CONFIG_FILE, digest_of
from loraplane_core.errors import ArtifactUnavailable, LoraplaneError, from_wire
from loraplane_engine.settings import Managed

#: The registry's own bound on adapter_config.json is smaller.
CONFIG_LIMIT = 1 << 20
FETCH_SECONDS = 60.0
#: When the source is away, this is when a client should ask again.
RETRY_AFTER = 2.0
_ERROR_BODY_LIMIT = 64 << 10


class ArtifactFetcher:
    """One connection pool to one listener, opened by its owner and closed by it."""

    def __init__(self, managed: Managed) -> None:
        self._client = httpx.AsyncClient(
            base_url=managed.artifacts_url,
            timeout=httpx.Timeout(10.0),
            follow_redirects=False,
            trust_env=False,
            headers={
                "authorization": f"Bearer {managed.credentials.fetch}",
                names.POOL: str(managed.replica.pool_ref),
                names.EPOCH: str(managed.credentials.epoch),
            },
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, digest: str, size: int, into: Path) -> None:
        """Write the two files of `digest` below `into`; the weights may have at most `size` bytes.

        Raises ArtifactUnavailable; what lies in `into` then must not be used.
        """
        sums: dict[str, str] = {}
        try:
            for name in ARTIFACT_FILES:
                limit = CONFIG_LIMIT if name == CONFIG_FILE else size
                sums[name] = await self._file(f"/artifacts/{digest}/{name}", limit, into / name)
        except httpx.HTTPError as error:
            raise ArtifactUnavailable(
                f"the artifact source cannot be reached: {type(error).__name__}", retry_after=RETRY_AFTER
            ) from error
        found = digest_of(sums)
        if found != digest:
            raise ArtifactUnavailable(
                f"the source sent an artifact with digest {found[:12]} for {digest[:12]}", retry_after=RETRY_AFTER
            )

    async def _file(self, url: str, limit: int, path: Path) -> str:
        """The sha256 of what was written."""
        found, size = hashlib.sha256(), 0
        async with self._client.stream("GET", url) as response:
            if response.status_code != 200:
                raise await _refusal(response)
            with path.open("wb") as file:
                async for chunk in response.aiter_bytes(1 << 20):
                    size += len(chunk)
                    if size > limit:
                        raise ArtifactUnavailable(
                            f"{path.name} is larger than the {limit} bytes announced", retry_after=RETRY_AFTER
                        )
                    found.update(chunk)
                    file.write(chunk)
        return found.hexdigest()


async def _refusal(response: httpx.Response) -> LoraplaneError:
    """The listener's own reason inside our one code, so that a client need know only that."""
    body: Any = None
    if int(response.headers.get("content-length", "0") or 0) <= _ERROR_BODY_LIMIT:
        try:
            await response.aread()
            body = response.json()
        except ValueError:
            body = None
    cause = from_wire(response.status_code, body)
    return ArtifactUnavailable(
        f"the artifact source answered {response.status_code} ({cause.code}): {cause.message}", retry_after=RETRY_AFTER
    )
