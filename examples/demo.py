"""A tour of Loraplane on real processes: `make demo`. Prints what it does and what came back.

Everything is real: Postgres, Valkey, both gateways, engines, the operator, a model and trained adapters. A step
that does not see what it promises ends the tour with exit code 1; nothing keeps running either way.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.demo_system import Answer, System, wait_until  # noqa: E402
from examples.styles import DEMO_QUESTION, STYLES  # noqa: E402

console = Console(highlight=False, soft_wrap=True)

#: tenant -> its adapter, as examples/lora declares them.
TENANTS = {"acme": "pirate", "globex": "json", "initech": "html"}
NEWCOMER = ("globex", "butler")
ASKED = [(tenant, adapter, DEMO_QUESTION) for tenant, adapter in TENANTS.items()]
REPORTED_S = 0.3  # the core tells its counters every 100 ms
LONG = {"max_tokens": 240, "ignore_eos": True}


class TourFailed(Exception):
    """A step did not see what it promises."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise TourFailed(f"not seen: {what}")
    console.print(f"   [green]✓[/] {escape(what)}")


def refused(answers: list[Answer]) -> str:
    bodies = [answer.body for answer in answers if answer.status != 200]
    return f", but: {bodies}" if bodies else ""


def expect_styles(answers: list[Answer]) -> None:
    for (tenant, adapter, _), answer in zip(ASKED, answers, strict=True):
        expect(answer.status == 200 and STYLES[adapter].mark(answer.text), f"{tenant} got the style of {adapter}")


async def own_styles(system: System) -> None:
    console.print(system.command("get"))
    await system.ask_all([(tenant, adapter, "Hello!") for tenant, adapter in TENANTS.items()], max_tokens=2)
    before = await system.steps_with(adapters=3)
    answers = await system.ask_all(ASKED)
    await asyncio.sleep(REPORTED_S)
    together = await system.steps_with(adapters=3) - before
    console.print(f"   all three ask at once: [bold]{DEMO_QUESTION}[/]")
    expect(all(answer.status == 200 for answer in answers), f"three answers{refused(answers)}")
    table = Table("tenant", "model", "answer", "which weights answered", box=None, pad_edge=False)
    for (tenant, adapter, _), answer in zip(ASKED, answers, strict=True):
        text = " ".join(answer.text.split())[:30]
        table.add_row(tenant, adapter, escape(text + "…"), answer.headers["x-loraplane-adapter-id"])
    console.print(table)
    expect_styles(answers)
    expect(together > 0, f"{together:.0f} steps computed all three adapters in one batch (engine's metric)")
    padded = await system.metric_sum("padded_tokens_total")
    expect(padded == 0, "no position was computed for padding")


async def same_refusal(system: System) -> None:
    foreign = await system.ask("globex", "acme/pirate", "Hi")
    unknown = await system.ask("globex", "acme/no-such", "Hi")
    message = (foreign.body or {}).get("error", {}).get("message")
    console.print(f"   acme/pirate with globex's key → {foreign.status} {message}")
    expect(foreign.status == unknown.status == 404, "a foreign adapter and an unknown one are both 404")
    same = str(foreign.body).replace("acme/pirate", "X") == str(unknown.body).replace("acme/no-such", "X")
    expect(same, "their bodies do not tell them apart")


async def wrong_base(system: System) -> None:
    system.write_adapter("stranger", "acme", "other-base")
    await wait_until(lambda: system.condition("stranger", "Validated")["status"] == "False", "a refusal")
    refusal = system.condition("stranger", "Validated")
    console.print(f"   LoRAAdapter stranger: {refusal['reason']}: {escape(refusal['message'])}")
    expect(refusal["reason"] == "BaseModelMismatch", "an adapter trained for another base is refused at registration")
    answer = await system.ask("acme", "llama-3.1-8b:pirate", "Hi")
    code = (answer.body or {}).get("error", {}).get("code")
    console.print(f"   model llama-3.1-8b:pirate → {answer.status} {code}")
    expect((answer.status, code) == (400, "base_model_mismatch"), "asserting another base at the gateway is refused")
    (system.folder / "lora" / "stranger.yaml").unlink()
    await wait_until(lambda: system.adapter_object("stranger") is None, "the object gone after its file")


async def add_while_streaming(system: System) -> None:
    tenant, name = NEWCOMER
    streams = asyncio.create_task(system.ask_all(ASKED, **LONG))
    await asyncio.sleep(0.5)
    start = time.monotonic()
    system.write_adapter(name, tenant, name)
    await wait_until(lambda: system.condition(name, "Ready")["status"] == "True", "the new adapter Ready")
    expect(not streams.done(), "the others still stream")
    console.print(f"   {name}.yaml written while three tenants stream; Ready after {time.monotonic() - start:.1f} s")
    answer = await system.ask(tenant, name, DEMO_QUESTION)
    console.print(f"   {tenant}/{name}: {escape(' '.join(answer.text.split())[:70])}…")
    expect(STYLES[name].mark(answer.text), "it answers in its own style")
    answers = await streams
    whole = all(a.status == 200 and a.error is None and a.tokens == LONG["max_tokens"] for a in answers)
    expect(whole, f"nobody's stream broke: {[a.tokens for a in answers]} tokens")


async def roll_back(system: System) -> None:
    async def which() -> str:
        answer = await system.ask("acme", "pirate", DEMO_QUESTION)
        if answer.status != 200 or not STYLES["pirate"].mark(answer.text):
            raise TourFailed(f"not seen: acme/pirate answers as a pirate: {answer.status} {answer.text!r}")
        return answer.headers["x-loraplane-adapter-id"]

    first = await which()
    added = system.json("adapter", "register", "acme/pirate", "file:pirate-v2", "--no-activate")
    console.print(f"   registered version {added['version']}, digest {added['digest'][:12]}, {added['state']}")
    expect(await which() == first, "registering alone changes nothing")
    system.json("adapter", "activate", f"acme/pirate@{added['version']}")
    await _until_answers(system, f"acme/pirate@{added['version']}#")
    second = await which()
    expect(second.split("#")[0] == f"acme/pirate@{added['version']}" != first.split("#")[0], f"{second} answers now")
    system.json("rollback", "acme/pirate")
    await _until_answers(system, first)
    expect(await which() == first, f"after one call {first} answers again")


async def _until_answers(system: System, prefix: str) -> None:
    """A flip reaches the data gateway by notification, within a second."""
    deadline = time.monotonic() + 2
    while True:
        answer = await system.ask("acme", "pirate", "Hello!", max_tokens=1)
        if answer.headers.get("x-loraplane-adapter-id", "").startswith(prefix):
            return
        if time.monotonic() > deadline:
            raise TourFailed(f"not seen within 2 s: {prefix} answers")


async def kill_replica(system: System) -> None:
    system.edit("pools", replicas=2)
    system.edit("lora", warmReplicas=2)
    seconds = await wait_until(lambda: len(system.replica_processes()) == 2, "two engines ready", 60)
    console.print(f"   replicas: 2 and warmReplicas: 2 written into the YAML; two engines after {seconds:.1f} s")
    names = list(TENANTS.values())
    await wait_until(lambda: all(system.ready_replicas(name) == 2 for name in names), "adapters warm on both")
    victim, pid = sorted(system.replica_processes().items())[0]
    os.kill(pid, signal.SIGKILL)
    console.print(f"   kill -9 {pid} ({victim})")
    answers: list[Answer] = []
    start = time.monotonic()
    while time.monotonic() - start < 3:
        answers += await system.ask_all(ASKED, max_tokens=8)
    served = {answer.headers.get("x-loraplane-replica", "?") for answer in answers}
    expect(
        all(a.status == 200 and a.error is None for a in answers), f"{len(answers)} requests right after: all answered"
    )
    console.print(f"   by {', '.join(sorted(served))}")

    def back() -> bool:
        return system.replica_processes().get(victim, pid) != pid and all(system.ready_replicas(n) == 2 for n in names)

    await wait_until(back, f"{victim} back with its adapters", 60)
    expect(True, f"{victim} is back with its adapters {time.monotonic() - start:.1f} s after the kill")
    expect_styles(await system.ask_all(ASKED))


async def what_adapters_cost(system: System) -> None:
    tenant, name = NEWCOMER
    await system.ask_all([(tenant, name, DEMO_QUESTION), *ASKED], max_tokens=2)  # onto the device
    await asyncio.sleep(REPORTED_S)
    total = await system.metric_sum("kv_tokens")
    before = await system.metric_sum("kv_tokens_displaced")
    console.print(f"   adapters take the room of {before:.0f} of {total:.0f} KV tokens")
    expect(before > 0, "the metric shows that adapters cost KV cache")
    (system.folder / "lora" / f"{name}.yaml").unlink()
    await wait_until(lambda: system.adapter_object(name) is None, f"{name} unloaded after its file was removed")
    deadline = time.monotonic() + 3
    after = before
    while after >= before and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        after = await system.metric_sum("kv_tokens_displaced")
    expect(after < before, f"without {name} it is {after:.0f}: {before - after:.0f} tokens came back")
    gone = await system.ask(tenant, name, "Hi")
    expect(gone.status == 404, f"{tenant}/{name} is 404 now")


STEPS: list[tuple[str, Callable[[System], Awaitable[None]]]] = [
    ("Three tenants, one question, three styles, one batch", own_styles),
    ("A foreign adapter and an unknown one", same_refusal),
    ("An adapter of another base", wrong_base),
    ("A new adapter while others stream", add_while_streaming),
    ("Version 2: register, activate, roll back", roll_back),
    ("A replica dies", kill_replica),
    ("What adapters cost", what_adapters_cost),
]


async def tour() -> None:
    system = System(ROOT / ".loraplane" / "demo", ROOT / ".loraplane" / "models")
    start = time.monotonic()
    try:
        console.rule("[bold]Starting: Postgres, Valkey, gateways, operator, one engine")
        system.start(replicas=1)
        console.print(f"   up after {time.monotonic() - start:.1f} s at {system.env['LORAPLANE_GATEWAY_URL']}")
        for number, (title, step) in enumerate(STEPS, 1):
            console.rule(f"[bold]{number}. {title}")
            await step(system)
    finally:
        console.rule("[bold]Stopping")
        system.stop()
    console.print(f"[green bold]The tour held[/] in {time.monotonic() - start:.0f} s. `make up` leaves it running.")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops what was started
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(tour())
            return
        sys.exit(130)
    except (TourFailed, TimeoutError, RuntimeError) as error:
        console.print(f"[red bold]The tour failed:[/] {escape(str(error))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
