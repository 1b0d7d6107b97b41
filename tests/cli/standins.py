"""Stand-ins for Loraplane's processes, so that the supervisor is tested without them."""

import sys
from collections.abc import Callable
from pathlib import Path

from loraplane_cli.supervisor.components import Kit, Options, Urls
from loraplane_cli.supervisor.keeper import Component, Stops
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.probes import blocking, http_ready
from loraplane_cli.supervisor.spec import ProcessSpec

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-I", "-S", "-c")  # bare: they start in a moment
SERVE = (Path(__file__).parent / "tiny_server.py").read_text()
ENGINE = (*PYTHON, SERVE, "engine")


class StandIns:
    """A registry, a data gateway and an operator; `broken` names one that ends at once."""

    def __init__(self, kit: Kit, broken: str = "") -> None:
        self._kit = kit
        self._broken = broken
        self._ports = {name: kit.ports.assign(name) for name in ("registry", "gateway-0")}

    def groups(self) -> list[list[Component]]:
        sleeper = self._make("operator", "import time; time.sleep(600)")
        return [
            [Component("migrate", self._make("migrate", "import sys"), None)],
            [
                self._server("registry"),
                self._server("gateway-0", "edge"),
                Component("operator", sleeper, blocking(lambda: True), stops="first"),
            ],
        ]

    def urls(self) -> Urls:
        registry = f"http://127.0.0.1:{self._ports['registry']}"
        return Urls(
            gateways=(f"http://127.0.0.1:{self._ports['gateway-0']}",),
            admin=registry,
            artifacts=registry,
            database="postgresql://loraplane:it's%20secret@127.0.0.1/loraplane",
            redis="redis://:x@127.0.0.1/0",
        )

    def _server(self, name: str, stops: Stops = "last") -> Component:
        code = "raise SystemExit('no such table')" if name == self._broken else SERVE
        port = self._ports[name]
        probe = http_ready(self._kit.client, lambda: port, "/health/ready")
        make = self._make(name, code, str(port))
        return Component(name, make, probe, start_seconds=20, port=lambda: port, stops=stops)

    def _make(self, name: str, code: str, *arguments: str) -> Callable[[], ProcessSpec]:
        return lambda: ProcessSpec(
            name=name, argv=(*PYTHON, code, name, "--metrics-port", *arguments), env=self._kit.env, stop_seconds=5
        )


def main() -> None:
    """`python -m tests.cli.standins STATE FOLDER [BROKEN]`: a supervisor of stand-ins, as `loraplane up` runs one."""
    import logging

    from loraplane_cli.supervisor.supervisor import supervise

    logging.basicConfig(level=logging.INFO)
    state, folder = StateFolder.of(Path(sys.argv[1])), Path(sys.argv[2])
    broken = sys.argv[3] if len(sys.argv) > 3 else ""
    supervise(
        state,
        Options(folder=folder, adapter_root=folder, model_root=folder),
        make_parts=lambda kit: StandIns(kit, broken),
        engine=ENGINE,
    )


if __name__ == "__main__":
    main()
