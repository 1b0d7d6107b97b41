"""The local supervisor over its unix socket (wire/supervisor.py): one line out, one line back, a deadline."""

import asyncio
from pathlib import Path

from loraplane_core.errors import LoraplaneError, Unavailable, from_wire
from loraplane_core.wire import decode, encode
from loraplane_core.wire.supervisor import SupervisorAnswer, SupervisorRequest

CALL_SECONDS = 5.0
_LINE_MAX = 16 << 20


class SupervisorClient:
    """A connection per request, so that nothing has to be re-made when the supervisor restarts."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def ask(self, request: SupervisorRequest) -> SupervisorAnswer:
        """Raises Unavailable (code cluster_unavailable), or what the supervisor refused with."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                line = await self._exchange(encode(request) + b"\n")
        except TimeoutError as error:
            raise Unavailable("the supervisor did not answer in time", code="cluster_unavailable") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the supervisor does not answer: {error}", code="cluster_unavailable") from error
        if not line.endswith(b"\n"):
            raise Unavailable("the supervisor closed the connection", code="cluster_unavailable")
        answer = decode(line, SupervisorAnswer)
        if not answer.ok:
            raise _refusal(answer)
        return answer

    async def _exchange(self, line: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=_LINE_MAX)
        try:
            writer.write(line)
            await writer.drain()
            return await reader.readline()
        finally:
            writer.close()


def _refusal(answer: SupervisorAnswer) -> LoraplaneError:
    error = answer.error or {}
    return from_wire(409, error if "error" in error else {"error": error})
