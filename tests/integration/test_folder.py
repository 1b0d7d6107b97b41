"""An edited, added or removed YAML is acted on within two seconds."""

import time

from examples.demo_system import System, wait_until

ACTED_ON_S = 2.0


async def test_an_added_an_edited_and_a_removed_document(system: System) -> None:
    path = system.write_adapter("butler", "globex", "butler")
    assert await wait_until(lambda: system.adapter_object("butler") is not None, "the object", 10) < ACTED_ON_S
    await wait_until(lambda: system.condition("butler", "Ready")["status"] == "True", "Ready", 20)
    assert (await system.ask("globex", "butler", "Hi", max_tokens=4)).status == 200

    before = (system.adapter_object("butler") or {})["metadata"]["generation"]
    path.write_text(path.read_text().replace("file:butler", "file:pirate"))
    seconds = await wait_until(
        lambda: (system.adapter_object("butler") or {})["metadata"]["generation"] > before, "the edit", 10
    )
    assert seconds < ACTED_ON_S
    await wait_until(lambda: (system.adapter_object("butler") or {})["status"].get("activeVersion") == 2, "v2", 20)

    path.unlink()
    start = time.monotonic()
    while (await system.ask("globex", "butler", "Hi", max_tokens=1)).status != 404:
        assert time.monotonic() - start < 10
    await wait_until(lambda: system.adapter_object("butler") is None, "the object gone", 20)
