"""A core process that is scripted by the test: speaks messages.py over zmq from the test's own loop.

The child the engine starts and watches is a `cat` on a FIFO: it ends when the fake is told to shut
down or to die.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from loraplane_engine import messages as m
from loraplane_engine.adapters.image import read_manifest
from loraplane_engine.options import CoreOptions

LAYOUT = "v1/float32/65536"
MAX_MODEL_LEN = 512
VOCABULARY = 260

Script = Callable[[m.Generate], list[m.FromCore]]


def stats(**changes: object) -> m.StepStats:
    values: dict[str, object] = dict.fromkeys(m.StepStats.__struct_fields__, 0)
    values |= {
        "adapters_in_step_histogram": [0, 0],
        "tokens_by_adapter": {},
        "adapter_budget_bytes": 1 << 20,
        "kv_tokens_total": 4096,
        "kv_tokens_free": 4096,
    }
    return m.StepStats(**(values | changes))  # type: ignore[arg-type]


def answer(generate: m.Generate, text: str | bytes = "hello", finish: m.FinishReason = "stop") -> list[m.FromCore]:
    """One token per byte, cut at max_tokens."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    if len(tokens) >= generate.sampling.max_tokens:
        tokens, finish = tokens[: generate.sampling.max_tokens], "length"
    found: list[m.FromCore] = [m.Scheduled(request=generate.request, queue_ms=1.5, cold=generate.cold)]
    want = generate.sampling.logprobs
    for at, token in enumerate(tokens):
        logprobs = None
        if want is not None:
            logprobs = [m.TokenLogprob(token=token, logprob=-0.5, top=[(token, -0.5), (65, -2.0)][:want])]
        last = at == len(tokens) - 1
        found.append(
            m.Output(
                request=generate.request,
                tokens=[token],
                logprobs=logprobs,
                finish=finish if last else None,
                stop_token=257 if last and finish == "stop" else None,
            )
        )
    return found


class FakeCore:
    def __init__(self, folder: Path, *, hold: bool) -> None:
        self._ready = asyncio.Event()
        if not hold:
            self._ready.set()
        self.received: list[m.ToCore] = []
        self.script: Script = answer
        self.load_answer: Callable[[m.LoadAdapter], m.AdapterState | m.AdapterFailed | None] = self._host
        self.unload_at_once = True
        self.mark_answer: Callable[[m.MarkAdapter], list[m.FromCore]] = self._marked
        self.adapters: dict[m.AdapterKey, m.AdapterState] = {}
        self._changed = asyncio.Condition()
        self._fifo = folder / "core.fifo"
        os.mkfifo(self._fifo)
        self._life = os.open(self._fifo, os.O_RDWR)
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()

    def command(self, options: CoreOptions, endpoint: str) -> list[str]:
        del options
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._task = asyncio.create_task(self._run())
        return ["cat", str(self._fifo)]

    def say(self, *messages: m.FromCore) -> None:
        assert self._socket is not None
        self._socket.send_multipart([m.encoder.encode(message) for message in messages])

    def unload(self, key: m.AdapterKey) -> None:
        nowhere = m.AdapterState(
            key=key, residency="absent", bytes=0, rank=0, pinned=False, warm_wanted=False, in_use=0
        )
        self._tell(replaced(self.adapters.get(key, nowhere), residency="absent"))

    def reset(self) -> None:
        self.unload_at_once = True
        self.mark_answer = self._marked
        self.received.clear()
        self.script = answer
        self.load_answer = self._host

    def release(self) -> None:
        """Let a core that was held finish loading its model."""
        self._ready.set()

    def die(self) -> None:
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [message for message in self.received if isinstance(message, kind)]

    async def wait_for(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    async def close(self) -> None:
        self.die()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    def _host(self, load: m.LoadAdapter) -> m.AdapterState:
        manifest, _ = read_manifest(Path(load.image))
        return m.AdapterState(
            key=load.key,
            residency="host",
            bytes=manifest.data_bytes,
            rank=manifest.rank,
            pinned=False,
            warm_wanted=load.warm_wanted,
            in_use=0,
        )

    async def _run(self) -> None:
        assert self._socket is not None
        ready = m.CoreReady(
            page_bytes=65536,
            layout=LAYOUT,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            lora_form="torch",
            threads=1,
        )
        await self._ready.wait()
        self.say(ready, stats())
        while True:
            for frame in await self._socket.recv_multipart():
                await self._take(m.to_core_decoder.decode(frame))

    async def _take(self, message: m.ToCore) -> None:
        async with self._changed:
            self.received.append(message)
            self._changed.notify_all()
        if isinstance(message, m.Generate):
            for reply in self.script(message):
                self.say(reply)
        elif isinstance(message, m.LoadAdapter):
            self._tell(self.load_answer(message))
        elif isinstance(message, m.MarkAdapter):
            for reply in self.mark_answer(message):
                self.say(reply)
        elif isinstance(message, m.UnloadAdapter):
            if self.unload_at_once:
                self.unload(message.key)
        elif isinstance(message, m.Shutdown):
            self.die()

    def _marked(self, mark: m.MarkAdapter) -> list[m.FromCore]:
        changes = {"pinned": mark.pinned, "warm_wanted": mark.warm_wanted}
        chosen = {name: value for name, value in changes.items() if value is not None}
        self.adapters[mark.key] = replaced(self.adapters[mark.key], **chosen)
        return [self.adapters[mark.key]]

    def _tell(self, message: m.AdapterState | m.AdapterFailed | None) -> None:
        if isinstance(message, m.AdapterState):
            self.adapters[message.key] = message
        if message is not None:
            self.say(message)


def replaced(state: m.AdapterState, **changes: object) -> m.AdapterState:
    values = {name: getattr(state, name) for name in state.__struct_fields__}
    return m.AdapterState(**(values | changes))


@contextlib.asynccontextmanager
async def fake_core(folder: Path, *, hold: bool = False) -> AsyncIterator[FakeCore]:
    core = FakeCore(folder, hold=hold)
    try:
        yield core
    finally:
        await core.close()
