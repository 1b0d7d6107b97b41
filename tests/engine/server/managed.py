"""Asking a managed engine as the gateway and the operator do."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engine.server.artifacts import Source, make_artifact
from tests.engine.server.world import World, until


@dataclass(frozen=True)
class Known:
    """An adapter the source has, different in every test, so that tests can share one engine."""

    ref: str
    digest: str

    @property
    def path(self) -> str:
        return "/adapters/" + self.ref.replace("@", "/")


_seeds = itertools.count()


def offer(source: Source, tmp_path: Path) -> Known:
    seed = next(_seeds)
    folder = tmp_path / f"artifact{seed}"
    digest = make_artifact(folder, seed)
    source.folders[digest] = folder
    return Known(f"acme/a{seed}@3", digest)


async def ask(world: World, known: Known, **body: Any) -> httpx.Response:
    request = {"model": "support", "prompt": "hi"} | body
    return await world.data.post("/v1/completions", json=request, headers=world.headers(known.ref, known.digest))


def put_body(digest: str, **changes: Any) -> dict[str, Any]:
    return {"digest": digest, "bytes": 1 << 20, "rank": 4, "deadline_s": 10} | changes


async def put(world: World, known: Known, **changes: Any) -> httpx.Response:
    return await world.admin.put(known.path, json=put_body(known.digest, **changes))


async def delete(world: World, known: Known, **query: Any) -> httpx.Response:
    return await world.admin.delete(known.path, params=query, headers={"x-loraplane-digest": known.digest})


async def listed(world: World) -> dict[str, dict[str, Any]]:
    return {each["ref"]: each for each in (await world.admin.get("/adapters")).json()["adapters"]}


async def being_fetched(source: Source) -> None:
    await until(lambda: bool(source.served))


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
