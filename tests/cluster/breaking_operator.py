"""`python -m tests.cluster.breaking_operator …`: the operator, one of whose watchers breaks on SIGUSR1.

What a defect in a watcher does cannot be had from outside: they survive whatever their other side does. The
last argument says which one: cluster, feed or kopf.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from loraplane_operator import __main__ as program
from loraplane_operator import handlers
from loraplane_operator.cluster.kubernetes import KubernetesCluster
from loraplane_operator.registry.feed import Feed

_WATCHERS = {"cluster": (KubernetesCluster, "run"), "feed": (Feed, "run"), "kopf": (handlers, "watch")}


def _breaking(watch: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def run(*arguments: Any, **options: Any) -> None:
        broken = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, broken.set)
        watching = asyncio.ensure_future(watch(*arguments, **options))
        try:
            await broken.wait()
            raise RuntimeError("a defect made by the test")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    return run


def main() -> int:
    *arguments, which = sys.argv[1:]
    owner, name = _WATCHERS[which]
    setattr(owner, name, _breaking(getattr(owner, name)))
    return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
