# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import text

from loraplane_gateway.registry.adapters.repository import Intent
from loraplane_gateway.registry.rows import Repository

#: A waiter ends its own intent at its deadline; one that is this much older has lost its waiter.
ABANDONED_SECONDS = 10.0

_WEIGHTS = text("""
    SELECT version, weight FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter AND is_active
    ORDER BY version""")
_SHARE = text("""
    UPDATE tenant_adapters v SET is_active = s.weight IS NOT NULL, weight = coalesce(s.weight, 0)
    FROM tenant_adapters o LEFT JOIN unnest(CAST(:versions AS int[]), CAST(:weights AS int[])) AS s (version, weight)
        ON s.version = o.version
    WHERE o.tenant_id = :tenant AND o.adapter = :adapter AND (o.is_active OR s.weight IS NOT NULL)
      AND v.tenant_id = o.tenant_id AND v.adapter = o.adapter AND v.version = o.version""")
_CLEARED = "intent_id = NULL, intent_version = NULL, intent_deadline = NULL, intent_action = NULL, intent_actor = NULL"
_REMEMBER = text(f"""
    UPDATE adapters SET previous_version = nullif(CAST(:previous AS int), 0),
        last_sole = nullif(CAST(:last_sole AS int), 0), intent_done = coalesce(:done, intent_done), {_CLEARED}
    WHERE tenant_id = :tenant AND name = :adapter""")
_INTEND = text("""
    UPDATE adapters SET intent_id = :id, intent_version = :version, intent_action = :action, intent_actor = :actor,
        intent_deadline = now() + make_interval(secs => :seconds)
    WHERE tenant_id = :tenant AND name = :adapter""")
_DROP = text(f"UPDATE adapters SET {_CLEARED} WHERE tenant_id = :tenant AND name = :adapter AND intent_id IS NOT NULL")
_REFUSE = text(f"""
    UPDATE adapters SET intent_refused = intent_id, intent_refusal = :words, {_CLEARED}
    WHERE tenant_id = :tenant AND name = :adapter""")
_STANDING = text("""
    SELECT intent_id, intent_done, intent_refused, intent_refusal FROM adapters
    WHERE tenant_id = :tenant AND name = :adapter""")
_SWEEP = text(f"""
    UPDATE adapters SET {_CLEARED}
    WHERE intent_id IS NOT NULL AND intent_deadline < now() - make_interval(secs => :late)""")


@dataclass(frozen=True, slots=True)
class Standing:
    """The ids of the intent that waits, of the last one that came true and of the last one that was refused, with
    the operator's words about that; empty for none."""

    waiting: str
    done: str
    refused: str
    refusal: str


class ActivationRepository(Repository):
    """Writes expect the adapter's row to be locked by this transaction."""

    async def weights(self, adapter: str) -> dict[int, int]:
        """Of the versions that have a share, by version."""
        rows = await self.session.execute(_WEIGHTS, self._key(adapter))
        return {row.version: row.weight for row in rows}

    async def share(self, adapter: str, weights: Mapping[int, int]) -> None:
        """From this transaction's commit on requests go to these versions and no others."""
        values = {"versions": list(weights), "weights": list(weights.values())}
        await self.session.execute(_SHARE, {**self._key(adapter), **values})

    async def remember(self, adapter: str, *, previous: int, last_sole: int, done: str | None) -> None:
        """What a rollback needs. Whatever waited has come true (`done`, its id) or been replaced."""
        values = {"previous": previous, "last_sole": last_sole, "done": done}
        await self.session.execute(_REMEMBER, {**self._key(adapter), **values})

    async def intend(self, adapter: str, intent: Intent, seconds: float) -> None:
        """Replaces the one that waited."""
        values = {"id": intent.id, "version": intent.version, "action": intent.action, "actor": intent.actor}
        await self.session.execute(_INTEND, {**self._key(adapter), **values, "seconds": seconds})

    async def drop_intent(self, adapter: str) -> None:
        await self.session.execute(_DROP, self._key(adapter))

    async def refuse_intent(self, adapter: str, words: str) -> None:
        await self.session.execute(_REFUSE, {**self._key(adapter), "words": words})

    async def standing(self, adapter: str) -> Standing | None:
        """None when the adapter is gone. Takes no lock."""
        row = (await self.session.execute(_STANDING, self._key(adapter))).one_or_none()
        if row is None:
            return None
        return Standing(row.intent_id or "", row.intent_done or "", row.intent_refused or "", row.intent_refusal)

    async def sweep(self) -> None:
        """Intents whose waiter died with its process; in the platform's scope."""
        await self.session.execute(_SWEEP, {"late": ABANDONED_SECONDS})

    def _key(self, adapter: str) -> dict[str, object]:
        return {"tenant": self.tenant, "adapter": adapter}
