"""Which versions of an adapter serve: each change is one transaction, with its audit row and its change of the feed."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from loraplane_core.errors import ActivationOwned, Conflict, InvalidParameter, NotActivatable, NotFound
from loraplane_core.wire.registry import Activate, Adapter, Rollback, SetTraffic, Share, Warmed
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.adapters.repository import (
    AdapterRepository,
    AdapterRow,
    Intent,
    heaviest,
    rollback_target,
    sole,
)
from loraplane_gateway.registry.audit import AuditRepository

MAX_WAIT_SECONDS = 300.0
MAX_SHARES = 100
MAX_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Pending:
    """An activation that waits until its version is warm; `serving` goes on meanwhile (0 = none)."""

    tenant: str
    adapter: str
    intent: Intent
    serving: int
    warm_replicas: int
    seconds: float

    @property
    def named(self) -> str:
        return f"version {self.intent.version} of {self.tenant}/{self.adapter}"

    @property
    def meanwhile(self) -> str:
        return f"version {self.serving} keeps serving" if self.serving else "no version serves"


class ActivationService:
    def __init__(self, session: Session, scope: Scope, actor: str) -> None:
        self._adapters = AdapterRepository(session, scope)
        self._activation = ActivationRepository(session, scope)
        self._audit = AuditRepository(session, scope)
        self._actor = actor

    async def activate(self, adapter: str, order: Activate, *, by_object: bool = False) -> Adapter | Pending:
        """Serve `order.version` alone; 0 serves none. At once, or once it is warm.

        Raises NotFound, ActivationOwned, NotActivatable, InvalidParameter, Conflict (active_changed,
        activation_not_owned).
        """
        seconds = _patience(order)
        locked = await self._locked(adapter, by_object=by_object, stops=order.version == 0)
        weights = await self._activation.weights(adapter)
        active = heaviest(weights)
        if order.expect_active is not None and order.expect_active != active:
            raise Conflict(
                f"version {active} of {locked.tenant}/{adapter} is active, not {order.expect_active}",
                param="expect_active",
                code="active_changed",
            )
        return await self._move(locked, weights, order.version, "adapter.activate", seconds)

    async def rollback(self, adapter: str, order: Rollback) -> Adapter | Pending:
        """Back to the version named, or to the one that served alone before. Again: forth.

        While several have a share it ends the split: back to the version that served alone before it.
        """
        seconds = _patience(order)
        locked = await self._locked(adapter, by_object=False)
        weights = await self._activation.weights(adapter)
        target = order.version
        if target is None:
            target = rollback_target(weights, locked.previous_version, locked.last_sole)
        if not target:
            raise NotActivatable(f"{locked.tenant}/{adapter} has no earlier version to go back to")
        return await self._move(locked, weights, target, "adapter.rollback", seconds)

    async def set_traffic(self, adapter: str, order: SetTraffic, *, by_object: bool = False) -> Adapter:
        """All shares at once; versions not named get none.

        Raises NotFound, ActivationOwned, NotActivatable, InvalidParameter, Conflict (traffic_changed,
        activation_not_owned).
        """
        wanted = _checked(order.shares)
        locked = await self._locked(adapter, by_object=by_object)
        weights = await self._activation.weights(adapter)
        if order.expect is not None and weights != {share.version: share.weight for share in order.expect}:
            raise Conflict(
                f"the shares of {locked.tenant}/{adapter} are {_shown(weights) or 'none'}, not the expected ones",
                param="expect",
                code="traffic_changed",
            )
        for version in wanted:
            await self._require_servable(locked, version)
        await self._share(locked, weights, wanted, "adapter.traffic", detail=_shown(wanted))
        return await self._now(adapter)

    async def warmed(self, adapter: str, word: Warmed) -> Adapter:
        """The operator saw a version warm: what waited for exactly that comes true. Or has no place for it: what
        waited ends. Otherwise nothing happens."""
        locked = await self._adapters.lock(adapter)
        if locked is None:
            raise NotFound("there is no such adapter")
        intent = locked.intent
        if intent is not None and intent.version == word.version and word.refusal:
            await self._activation.refuse_intent(adapter, word.refusal[:MAX_WORDS].replace("\0", ""))
        elif intent is not None and intent.version == word.version:
            version = await self._adapters.version(adapter, word.version)
            if version is not None and version.state == "validated" and version.digest == word.digest:
                weights = await self._activation.weights(adapter)
                await self._share(locked, weights, {word.version: 100}, intent.action, done=intent)
        return await self._now(adapter)

    async def give_up(self, pending: Pending) -> Adapter | None:
        """The end of waiting: withdraws the intent. The adapter, when it came true in the last moment.

        Raises NotActivatable when the operator has no place for the version.
        """
        await self._adapters.lock(pending.adapter)
        standing = await self._activation.standing(pending.adapter)
        if standing is not None and standing.done == pending.intent.id:
            return await self._now(pending.adapter)
        if standing is not None and standing.waiting == pending.intent.id:
            await self._activation.drop_intent(pending.adapter)
        if standing is not None and standing.refused == pending.intent.id:
            raise NotActivatable(f"{pending.named} cannot become warm: {standing.refusal}; {pending.meanwhile}")
        return None

    async def activate_ingested(
        self, locked: AdapterRow, weights: Mapping[int, int], version: int, *, numbered: int
    ) -> None:
        """The flip that comes with the registration of `version`, which is validated.

        `weights` are those of now; `numbered` is its place in the order of registrations.

        An ingestion that finished late does not undo a newer one; an object that owns activation decides itself.
        """
        if locked.activation_owner == "object" or max(weights, default=0) > numbered:
            return
        await self._share(locked, weights, {version: 100}, "adapter.activate")

    async def stop(self, locked: AdapterRow) -> None:
        """Serve no version: the object that wanted it served is gone."""
        await self._share(locked, await self._activation.weights(locked.name), {}, "adapter.deactivate")

    async def _locked(self, adapter: str, *, by_object: bool, stops: bool = False) -> AdapterRow:
        """Who decides: the object while it owns activation, else REST. Any object may stop what it claims."""
        locked = await self._adapters.lock(adapter)
        if locked is None:
            raise NotFound("there is no such adapter")
        name, owned = f"{locked.tenant}/{adapter}", locked.activation_owner == "object"
        if owned and not by_object:
            raise ActivationOwned(f"the object {locked.claim_ref} decides which version of {name} serves")
        if by_object and not owned and not stops:
            raise Conflict(
                f"the object {locked.claim_ref} leaves it to REST which version of {name} serves",
                code="activation_not_owned",
            )
        return locked

    async def _move(
        self, locked: AdapterRow, weights: Mapping[int, int], target: int, action: str, seconds: float | None
    ) -> Adapter | Pending:
        """All requests to `target`, at once without `seconds`, or when there is nothing to wait for."""
        if target:
            await self._require_servable(locked, target)
        if seconds is None or not target or sole(weights) == target or not locked.warm_replicas:
            await self._share(locked, weights, {target: 100} if target else {}, action)
            return await self._now(locked.name)
        intent = Intent(secrets.token_hex(16), target, action, self._actor)
        await self._activation.intend(locked.name, intent, seconds)
        await self._audit.add(
            self._actor,
            "adapter.intend",
            tenant=locked.tenant,
            subject=locked.name,
            version=target,
            from_version=heaviest(weights),
        )
        return Pending(locked.tenant, locked.name, intent, heaviest(weights), locked.warm_replicas, seconds)

    async def _share(
        self,
        locked: AdapterRow,
        before: Mapping[int, int],
        after: Mapping[int, int],
        action: str,
        *,
        done: Intent | None = None,
        detail: str = "",
    ) -> None:
        if before == after:
            await self._activation.drop_intent(locked.name)
            return
        await self._activation.share(locked.name, after)
        # An older release moves the active version and knows nothing of last_sole: what is served now goes first.
        last_sole, previous = sole(before) or locked.last_sole, locked.previous_version
        if sole(after) and sole(after) != last_sole:
            last_sole, previous = sole(after), last_sole or previous
        await self._activation.remember(
            locked.name, previous=previous, last_sole=last_sole, done=done.id if done is not None else None
        )
        await self._audit.add(
            done.actor if done is not None else self._actor,
            action,
            tenant=locked.tenant,
            subject=locked.name,
            version=heaviest(after),
            from_version=heaviest(before),
            detail=detail,
        )

    async def _require_servable(self, locked: AdapterRow, number: int) -> None:
        version = await self._adapters.version(locked.name, number)
        if version is None:
            raise NotFound(f"{locked.tenant}/{locked.name} has no version {number}", param="version")
        if version.state != "validated":
            raise NotActivatable(f"version {number} is {version.state}, not validated", param="version")

    async def _now(self, adapter: str) -> Adapter:
        found = await self._adapters.get(adapter)
        if found is None:
            raise NotFound("there is no such adapter")
        return found


def _patience(order: Activate | Rollback) -> float | None:
    """How long the order waits for warmth; None: not at all."""
    if not order.wait:
        return None
    if not 0 < order.deadline_s <= MAX_WAIT_SECONDS:
        raise InvalidParameter(f"deadline_s lies above 0 and is at most {MAX_WAIT_SECONDS:.0f}", param="deadline_s")
    return order.deadline_s


def _checked(shares: list[Share]) -> dict[int, int]:
    """By version, in the order of versions. Raises InvalidParameter."""
    wanted = {share.version: share.weight for share in sorted(shares, key=lambda share: share.version)}
    if len(wanted) != len(shares) or len(shares) > MAX_SHARES:
        raise InvalidParameter("each version is named once", param="shares")
    if not all(1 <= weight <= 100 for weight in wanted.values()) or sum(wanted.values()) != 100:
        raise InvalidParameter(
            f"weights are whole percents from 1 to 100 and sum to 100; these sum to {sum(wanted.values())}",
            param="shares",
            code="invalid_weights",
        )
    return wanted


def _shown(weights: Mapping[int, int]) -> str:
    return ",".join(f"{version}={weight}" for version, weight in weights.items())
