"""Waiting until an activation came true. The order lies in the adapter's row, so any registry process may end it."""

import time

from loraplane_core.errors import Conflict, NotWarm, Unavailable
from loraplane_core.wire.registry import Adapter
from loraplane_gateway.db.sessions import Scope, transaction
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.activation.service import ActivationService, Pending
from loraplane_gateway.registry.state import RegistryState

#: Without notices from Postgres.
POLL_SECONDS = 0.5


async def until_warm(state: RegistryState, pending: Pending) -> Adapter:
    """The adapter with its new version. Raises NotWarm at the deadline, NotActivatable, Conflict (superseded),
    Unavailable.

    Who leaves earlier leaves the intent behind: it stands until its deadline.
    """
    deadline = time.monotonic() + pending.seconds
    scope = Scope(pending.tenant)
    while (left := deadline - time.monotonic()) > 0:
        seen = state.hub.position
        async with transaction(state.sessions, scope) as session:
            standing = await ActivationRepository(session, scope).standing(pending.adapter)
        if standing is None or standing.waiting != pending.intent.id:
            break
        if state.hub.closed:
            raise Unavailable("the registry stops; the activation stands until its deadline", retry_after=2)
        await state.hub.wait(seen, min(left, POLL_SECONDS))
    late = time.monotonic() >= deadline
    async with transaction(state.sessions, scope) as session:
        found = await ActivationService(session, scope, pending.intent.actor).give_up(pending)
    if found is not None:
        return found
    raise _not_warm(pending) if late else _superseded(pending)


def _not_warm(pending: Pending) -> NotWarm:
    return NotWarm(
        f"{pending.named} was not warm on {pending.warm_replicas} replica(s) within {pending.seconds:g} s;"
        f" {pending.meanwhile}"
    )


def _superseded(pending: Pending) -> Conflict:
    return Conflict(f"the activation of {pending.named} was replaced by a later change", code="superseded")
