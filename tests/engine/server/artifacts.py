"""Small real artifacts for the tiny model, and a listener that serves them as the registry does."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from starlette.types import Receive, Scope, Send

from loraplane_core.artifact.digest import artifact_digest
from loraplane_engine.server.asgi import send_json
from loraplane_engine.server.listeners import Listener


def make_artifact(folder: Path, seed: int = 0, rank: int = 4, scale: float = 1.0) -> str:
    """q_proj and v_proj of both layers of the tiny model; returns the digest."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for module, out in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = (scale * random.standard_normal((rank, 64))).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.standard_normal((out, rank)).astype(np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return artifact_digest(folder)


@dataclass
class Source:
    """`served` counts GETs per file name; `gate` closed lets requests wait; `refusal` answers all with it."""

    url: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    headers: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: tuple[int, str] | None = None
    corrupt: bool = False

    def reset(self) -> None:
        self.served.clear()
        self.headers.clear()
        self.gate.set()
        self.refusal = None
        self.corrupt = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, _, digest, name = scope["path"].split("/")
        self.served[name] += 1
        self.headers.append({key.decode(): value.decode() for key, value in scope["headers"]})
        await self.gate.wait()
        if self.refusal is not None:
            status, code = self.refusal
            await send_json(send, status, json.dumps({"error": {"code": code, "message": "no"}}).encode(), {})
            return
        body = (self.folders[digest] / name).read_bytes()
        if self.corrupt and name.endswith(".json"):
            body += b" "
        await send_json(send, 200, body, {})


@contextlib.asynccontextmanager
async def artifact_source() -> AsyncIterator[Source]:
    source = Source()
    source.gate.set()
    listener = Listener("127.0.0.1", 0, source)
    listener.start()
    source.url = f"http://127.0.0.1:{listener.port}"
    try:
        yield source
    finally:
        source.gate.set()
        await listener.stop(1)
