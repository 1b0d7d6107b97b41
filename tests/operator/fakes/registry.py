"""The registry's operator routes over dicts: claims, registration, activation, the change feed."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from aiohttp import web

from loraplane_core.errors import ClaimedByOther, Conflict, NotFound, TenantNotBound, TenantUnknown
from loraplane_core.wire import encode
from loraplane_core.wire.registry import (
    Activate,
    Adapter,
    Claim,
    ClaimRequest,
    FeedChange,
    FeedSnapshot,
    PoolReport,
    RegisterSource,
    SetTraffic,
    Version,
    Warmed,
)
from tests.operator.fakes.engine import BASE_DIGEST
from tests.operator.fakes.serving import Served, answer, read

Key = tuple[str, str]


def validated(version: Version) -> Version:
    """What ingestion makes of a good artifact."""
    digest = format(hash((version.adapter, version.version, version.path)) & (2**256 - 1), "064x")
    return msgspec.structs.replace(
        version, state="validated", digest=digest, bytes=1000, rank=8, base_model="base-a", base_digest=BASE_DIGEST
    )


def _weighted(entry: Adapter, shares: dict[int, int]) -> Adapter:
    versions = [
        msgspec.structs.replace(each, weight=shares.get(each.version, 0), is_active=each.version in shares)
        for each in entry.versions
    ]
    active = min(shares, key=lambda number: (-shares[number], number), default=0)
    return msgspec.structs.replace(entry, versions=versions, active_version=active)


class FakeRegistry(Served):
    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.tenants: dict[str, list[str]] = {}
        self.adapters: dict[Key, Adapter] = {}
        self.pools: dict[str, PoolReport] = {}
        self.calls: list[tuple[str, str]] = []
        self.ingest: Callable[[Version], Version] = validated
        self._sources: dict[tuple[Key, str], int] = {}  # uri -> version, so equal sources give equal versions
        self._keys: dict[tuple[str, str], int] = {}  # (uid, source hash) -> version
        self._changes: list[FeedChange] = []
        self._news = asyncio.Condition()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/operator/pools/{namespace}/{name}", self._report),
            web.delete("/operator/pools/{namespace}/{name}", self._remove_report),
            web.put("/operator/claims/{uid}", self._claim),
            web.delete("/operator/claims/{uid}", self._release),
            web.post("/operator/claims/{uid}/register", self._register),
            web.post("/operator/claims/{uid}/activate", self._activate),
            web.post("/operator/claims/{uid}/traffic", self._traffic),
            web.post("/operator/warm/{tenant}/{adapter}", self._warm),
            web.get("/operator/feed", self._feed),
        ]

    # -- what tests do to it

    async def create_tenant(self, name: str, *namespaces: str) -> None:
        self.tenants[name] = list(namespaces)
        await self._note(FeedChange(cursor=0, kind="tenant", tenant=name))

    async def put(self, adapter: Adapter) -> None:
        self.adapters[adapter.tenant, adapter.adapter] = adapter
        change = FeedChange(cursor=0, kind="adapter", tenant=adapter.tenant, name=adapter.adapter, adapter=adapter)
        await self._note(change)

    async def intend(self, key: Key, version: int) -> None:
        """Somebody activated with wait=warm."""
        await self.put(msgspec.structs.replace(self.adapters[key], intent_version=version))

    async def remove(self, key: Key) -> None:
        del self.adapters[key]
        await self._note(FeedChange(cursor=0, kind="adapter", tenant=key[0], name=key[1]))

    async def _note(self, change: FeedChange) -> None:
        async with self._news:
            self._changes.append(msgspec.structs.replace(change, cursor=len(self._changes) + 1))
            self._news.notify_all()

    # -- routes

    async def _report(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['namespace']}/{request.match_info['name']}"
        self.calls.append(("report", name))
        self.pools[name] = await read(request, PoolReport)
        return answer({})

    async def _remove_report(self, request: web.Request) -> web.Response:
        self.pools.pop(f"{request.match_info['namespace']}/{request.match_info['name']}", None)
        return answer({})

    async def _claim(self, request: web.Request) -> web.Response:
        uid, wanted = request.match_info["uid"], await read(request, ClaimRequest)
        self.calls.append(("claim", wanted.ref))
        if wanted.tenant not in self.tenants:
            raise TenantUnknown(f"there is no tenant {wanted.tenant}")
        if wanted.ref.partition("/")[0] not in self.tenants[wanted.tenant]:
            raise TenantNotBound(f"tenant {wanted.tenant} does not list the namespace")
        entry = self.adapters.get(
            (wanted.tenant, wanted.adapter), Adapter(tenant=wanted.tenant, adapter=wanted.adapter)
        )
        if entry.claim_uid not in ("", uid):
            raise ClaimedByOther(f"claimed by {entry.claim_ref}")
        owner = "object" if wanted.owns_activation else "registry"
        await self.put(
            msgspec.structs.replace(
                entry,
                source_hash=entry.source_hash if entry.claim_uid == uid else "",
                claim_uid=uid,
                claim_ref=wanted.ref,
                pool=wanted.pool,
                warm_replicas=wanted.warm_replicas,
                pinned=wanted.pinned,
                activation_owner=owner,
            )
        )
        return answer(Claim(uid=uid, ref=wanted.ref, tenant=wanted.tenant, adapter=wanted.adapter, pool=wanted.pool))

    def _held(self, request: web.Request) -> Adapter:
        uid = request.match_info["uid"]
        found = [entry for entry in self.adapters.values() if entry.claim_uid == uid]
        if not found:
            raise NotFound(f"no claim {uid}")
        return found[0]

    async def _release(self, request: web.Request) -> web.Response:
        entry = self._held(request)
        self.calls.append(("release", request.query["versions"]))
        if request.query["versions"] == "delete":
            await self.remove((entry.tenant, entry.adapter))
        else:
            free = msgspec.structs.replace(
                _weighted(entry, {}), claim_uid="", claim_ref="", source_hash="", source_version=0
            )
            await self.put(free)
        return answer({})

    async def _register(self, request: web.Request) -> web.Response:
        entry, wanted = self._held(request), await read(request, RegisterSource)
        key, uri = (entry.tenant, entry.adapter), wanted.source.uri
        self.calls.append(("register", uri))
        number = self._keys.get((entry.claim_uid, wanted.source_hash)) or self._sources.get((key, uri))
        version = next((each for each in entry.versions if each.version == number), None)
        if version is None:
            fresh = Version(tenant=key[0], adapter=key[1], version=len(entry.versions) + 1, state="ingesting", path=uri)
            version = self.ingest(fresh)
            entry = msgspec.structs.replace(entry, versions=[*entry.versions, version])
        self._sources[key, uri] = version.version
        first = (entry.claim_uid, wanted.source_hash) not in self._keys
        self._keys[entry.claim_uid, wanted.source_hash] = version.version
        entry = msgspec.structs.replace(entry, source_hash=wanted.source_hash, source_version=version.version)
        if first and version.state == "validated" and entry.activation_owner == "registry":
            entry = _weighted(entry, {version.version: 100})
        await self.put(entry)
        return answer(version)

    async def _activate(self, request: web.Request) -> web.Response:
        entry, wanted = self._held(request), await read(request, Activate)
        self.calls.append(("activate", str(wanted.version)))
        if wanted.expect_active not in (None, entry.active_version):
            raise Conflict("another version is active", code="active_changed")
        entry = _weighted(entry, {wanted.version: 100} if wanted.version else {})
        await self.put(entry)
        return answer(entry)

    async def _traffic(self, request: web.Request) -> web.Response:
        entry, wanted = self._held(request), await read(request, SetTraffic)
        self.calls.append(("traffic", ",".join(f"{each.version}={each.weight}" for each in wanted.shares)))
        now = {each.version: each.weight for each in entry.versions if each.weight}
        if wanted.expect is not None and {each.version: each.weight for each in wanted.expect} != now:
            raise Conflict("other weights are set", code="active_changed")
        entry = _weighted(entry, {each.version: each.weight for each in wanted.shares})
        await self.put(entry)
        return answer(entry)

    async def _warm(self, request: web.Request) -> web.Response:
        key = request.match_info["tenant"], request.match_info["adapter"]
        entry, told = self.adapters.get(key), await read(request, Warmed)
        self.calls.append(("warm", f"{key[1]}@{told.version}"))
        if entry is None:
            raise NotFound("there is no such adapter")
        if entry.intent_version == told.version:
            ended = entry if told.refusal else _weighted(entry, {told.version: 100})
            entry = msgspec.structs.replace(ended, intent_version=0)
            await self.put(entry)
        return answer(entry)

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        cursor = int(request.query.get("cursor", "-1"))
        if cursor < 0:
            cursor = len(self._changes)
            snapshot = FeedSnapshot(cursor=cursor, adapters=list(self.adapters.values()), tenants=list(self.tenants))
            await response.write(b"event: snapshot\ndata: " + encode(snapshot) + b"\n\n")
        while True:
            if not await self._changed(cursor):
                await response.write(b": alive\n\n")
            for change in self._changes[cursor:]:
                await response.write(b"event: change\nid: %d\ndata: %s\n\n" % (change.cursor, encode(change)))
                cursor = change.cursor

    async def _changed(self, cursor: int) -> bool:
        with contextlib.suppress(TimeoutError):
            async with self._news, asyncio.timeout(0.3):
                await self._news.wait_for(lambda: len(self._changes) > cursor)
        return len(self._changes) > cursor
