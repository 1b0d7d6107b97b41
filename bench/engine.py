"""Engine throughput: base, one adapter, three and six adapters, 18 requests at once.

usage: python bench/engine.py [--peer vllm] [--dtype float32] [--tokens 32] [--rounds 3]

Prints one JSON line per (system, cell) and a last one with the ratios. With --peer, the order is ours,
peer, ours, so that a machine that changes speed in between shows in the two runs of ours.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import servers  # noqa: E402
from bench.adapters import make_adapters  # noqa: E402
from bench.workload import Cell, measure  # noqa: E402

CELLS: Mapping[str, list[str]] = {
    "base": ["base"],
    "1 adapter": ["a0"],
    "3 adapters": ["a0", "a1", "a2"],
    "6 adapters": ["a0", "a1", "a2", "a3", "a4", "a5"],
}


def main() -> None:
    options = _options()
    work = ROOT / ".cache" / "bench"
    work.mkdir(parents=True, exist_ok=True)
    adapters = make_adapters(options.model, work / "adapters")
    python = servers.install_vllm(ROOT / ".cache" / "peer-vllm") if options.peer else None
    rates: dict[tuple[str, str], list[float]] = {}
    for system in ["loraplane", options.peer, "loraplane"] if options.peer else ["loraplane"]:
        port = servers.free_port()
        if system == "loraplane":
            command, environment = servers.ours(options.model, adapters, port=port, dtype=options.dtype)
        else:
            assert python is not None
            command, environment = servers.vllm(
                python, options.model, adapters, port=port, dtype=options.dtype, slots=options.peer_slots
            )
        with servers.serving(command, environment, port, work / f"{system}.log") as url:
            for name, models in CELLS.items():
                cell = asyncio.run(
                    measure(url, name, models, requests=options.requests, tokens=options.tokens, rounds=options.rounds)
                )
                rates.setdefault((system, name), []).append(cell.tokens_per_second)
                _print_cell(system, cell)
    print(json.dumps(_summary(rates, options)), flush=True)


def _print_cell(system: str, cell: Cell) -> None:
    line = {"system": system, "cell": cell.name, "tok_s": cell.tokens_per_second, "rounds": cell.rounds}
    print(json.dumps(line | {"ttft_p50_s": cell.ttft_p50, "ttft_max_s": cell.ttft_max}), flush=True)


def _summary(rates: Mapping[tuple[str, str], list[float]], options: argparse.Namespace) -> dict[str, object]:
    """Medians over a system's runs, and each as a ratio to the system's own base and to the peer's."""
    medians = {key: statistics.median(values) for key, values in rates.items()}
    systems = dict.fromkeys(system for system, _ in medians)
    found: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"cpu": _cpu(), "python": platform.python_version()},
        "dtype": options.dtype,
        "of_own_base": {s: {c: round(medians[s, c] / medians[s, "base"], 3) for c in CELLS} for s in systems},
    }
    if options.peer:
        found["loraplane_to_peer"] = {c: round(medians["loraplane", c] / medians[options.peer, c], 3) for c in CELLS}
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".loraplane" / "models" / "smollm2-135m-instruct")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--peer-slots", type=int, default=2, help="the peer's adapter slots (--max-loras)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
