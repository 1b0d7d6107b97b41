"""The engine's core in one process, without HTTP: what a step costs with 0, 1, 3 and 6 adapters.

usage: python bench/core_steps.py [--rows 18] [--tokens 32] [--rounds 5] [--dtype float32] [--threads 2]

Cells take turns, so that a busy machine hits all alike; each cell's figure is its best round, and `ratio` is the
median over rounds of its rate to the base's in the same round. `decode` leaves the prefill step out.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.adapters import make_adapters
from loraplane_engine.adapters.image import Layout, convert
from loraplane_engine.core.engine import EngineCore
from loraplane_engine.messages import AdapterKey, CoreReady, Generate, LoadAdapter, SamplingParams
from loraplane_engine.options import CoreOptions

MODEL = Path(".loraplane/models/smollm2-135m-instruct")
PROMPT = [19161, 253, 986, 2269, 563, 253, 9941, 30]  # any eight tokens
CELLS = (0, 1, 3, 6)


def load(core: EngineCore, images: Path, count: int) -> list[AdapterKey]:
    ready = next(message for message in core.outputs if isinstance(message, CoreReady))
    keys = []
    for name, folder in list(make_adapters(MODEL, images / "adapters").items())[:count]:
        manifest = convert(folder, images / name, Layout.parse(ready.layout))
        keys.append(AdapterKey(f"bench/{name}@1", manifest.digest))
        core.handle(LoadAdapter(key=keys[-1], image=str(images / name)))
    while core.residency.loading:
        core.step()
    return keys


def measure(core: EngineCore, keys: list[AdapterKey], rows: int, tokens: int) -> tuple[float, float]:
    """(tokens per second of the whole, tokens per second of the decode steps)."""
    for row in range(rows):
        core.handle(
            Generate(
                request=f"r{row}",
                adapter=keys[row % len(keys)] if keys else None,
                tenant="bench",
                prompt=PROMPT,
                sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            )
        )
    start = time.perf_counter()
    core.step()
    first = time.perf_counter()
    while core.step():
        core.outputs.clear()
    end = time.perf_counter()
    return rows * tokens / (end - start), rows * (tokens - 1) / (end - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    core = EngineCore(CoreOptions(model=str(MODEL), dtype=options.dtype, max_model_len=1024))
    with tempfile.TemporaryDirectory() as folder:
        keys = load(core, Path(folder), max(CELLS))
    rates: dict[int, list[tuple[float, float]]] = {cell: [] for cell in CELLS}
    for round_ in range(options.rounds + 1):
        for cell in CELLS:
            measured = measure(core, keys[:cell], options.rows, options.tokens)
            if round_:
                rates[cell].append(measured)
    for cell in CELLS:
        line = {
            "adapters": cell,
            "rows": options.rows,
            "tok_s": round(max(whole for whole, _ in rates[cell]), 1),
            "decode_tok_s": round(max(decode for _, decode in rates[cell]), 1),
            "ratio": round(
                statistics.median(own[1] / base[1] for own, base in zip(rates[cell], rates[0], strict=True)), 3
            ),
        }
        print(json.dumps(line))
    core.close()


if __name__ == "__main__":
    main()
