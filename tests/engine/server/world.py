"""A whole server process's worth of engine inside the test's loop, over a fake core."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplane_core.artifact.digest import base_digest
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_engine import settings as settings_module
from loraplane_engine.server.composition import Engine
from loraplane_engine.settings import Settings
from tests.engine.server.fake_core import FakeCore, fake_core

BASE = "tiny"
CREDENTIALS = EngineCredentials(
    epoch=2, data=["data-2", "data-1"], state=["state-2"], admin=["admin-2"], fetch="fetch-2"
)


def make_model(folder: Path) -> Path:
    """A model folder whose tokenizer has one token per byte (id = byte), so that tests can spell tokens."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {char: byte for char, byte in _byte_of().items() if char in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=by_byte, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])  # 256, 257
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 260,
    }
    (folder / "config.json").write_text(json.dumps(config))
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    return folder


def _byte_of() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass
class World:
    engine: Engine
    core: FakeCore
    settings: Settings
    ports: dict[str, int]
    data: httpx.AsyncClient
    admin: httpx.AsyncClient
    metrics: httpx.AsyncClient
    stop: asyncio.Event
    running: "asyncio.Task[int]"
    base_digest: str

    def headers(self, reference: str = "base", digest: str = "", size: int = 1 << 20) -> dict[str, str]:
        """What the gateway sends."""
        found = {
            "authorization": "Bearer data-2",
            "x-loraplane-adapter": reference,
            "x-loraplane-base-digest": self.base_digest,
        }
        if digest:
            found |= {"x-loraplane-digest": digest, "x-loraplane-bytes": str(size), "x-loraplane-rank": "4"}
        return found

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.data.post("/v1/completions", json={"model": BASE, "prompt": "hi"} | body)


def standalone(model: Path, folder: Path, *arguments: str) -> Settings:
    return settings_module.parse(
        [
            *("--model", str(model), "--served-name", BASE, "--port", "0", "--metrics-port", "0"),
            *("--ports-file", str(folder / "ports.json"), "--cache-dir", str(folder / "cache"), *arguments),
        ]
    )


def managed(model: Path, folder: Path, artifacts_url: str, *arguments: str) -> Settings:
    credentials = folder / "credentials.json"
    credentials.touch(0o600)
    credentials.write_text(json.dumps({name: getattr(CREDENTIALS, name) for name in CREDENTIALS.__struct_fields__}))
    return settings_module.parse(
        [
            *("--model", str(model), "--served-name", BASE, "--port", "0", "--credentials", str(credentials)),
            *("--replica", "default/pool/0", "--artifacts-url", artifacts_url, "--cache-dir", str(folder / "cache")),
            *("--ports-file", str(folder / "ports.json"), *arguments),
        ]
    )


@contextlib.asynccontextmanager
async def running(settings: Settings, folder: Path, *, ready: bool = True, hold: bool = False) -> AsyncIterator[World]:
    """Start the engine, wait until it is ready, stop it as SIGTERM would."""
    assert settings.ports_file is not None
    settings.ports_file.unlink(missing_ok=True)
    async with contextlib.AsyncExitStack() as owned:
        core = await owned.enter_async_context(fake_core(Path(tempfile.mkdtemp(dir=folder)), hold=hold))
        engine = Engine(replace(settings, drain_seconds=2.0), core.command)
        stop = asyncio.Event()
        task = asyncio.create_task(engine.run(stop))
        owned.push_async_callback(_stop, task, stop)
        ports = await _ports(settings.ports_file, task)

        def client(name: str, **headers: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.get(name, 1)}", timeout=20, headers=headers)

        data = await owned.enter_async_context(client("data"))
        admin = await owned.enter_async_context(client("admin", authorization="Bearer admin-2"))
        metrics = await owned.enter_async_context(client("metrics"))
        world = World(
            engine=engine,
            core=core,
            settings=settings,
            ports=ports,
            data=data,
            admin=admin,
            metrics=metrics,
            stop=stop,
            running=task,
            base_digest=base_digest(settings.model),
        )
        if ready:
            await until_ready(world)
        yield world


async def until_ready(world: World, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while (await world.data.get("/health/ready")).status_code != 200:
            assert not world.running.done(), "the engine ended while starting"
            await asyncio.sleep(0.01)


async def _ports(path: Path, task: "asyncio.Task[int]") -> dict[str, int]:
    def written() -> bool:
        assert not task.done(), "the engine ended while starting"
        return path.exists()

    await until(written)
    found: dict[str, int] = await asyncio.to_thread(lambda: json.loads(path.read_text()))
    return found


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition that nothing signals."""
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def _stop(task: "asyncio.Task[int]", stop: asyncio.Event) -> None:
    stop.set()
    async with asyncio.timeout(15):
        await asyncio.gather(task, return_exceptions=True)
