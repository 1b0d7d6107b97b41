"""Ending a uvicorn server of a test at once: its own loop looks up only every tenth of a second, twice."""

import asyncio

import uvicorn


async def halt(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    """Close its listeners, reset its connections, and wait for what ran on them."""
    if server.started:
        cut(server)
        if server.server_state.tasks:
            await asyncio.wait(set(server.server_state.tasks), timeout=5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def cut(server: uvicorn.Server) -> None:
    """As kill -9 looks from outside."""
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
