"""The core as a process: what it says, and when it ends."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from loraplane_engine import messages as m
from loraplane_engine.options import CoreOptions
from tests.engine.harness import make_base, random_prompt

WAIT_MS = 60_000


class Server:
    """The other end of the socket."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        endpoint = f"ipc://{folder}/core"
        self.socket.bind(endpoint)
        options = msgspec.json.encode(CoreOptions(model=str(base), max_model_len=128, threads=1)).decode()
        self.core = subprocess.Popen([sys.executable, "-m", "loraplane_engine.core", endpoint, options])
        self.waiting: list[m.FromCore] = []

    def send(self, *messages: m.ToCore) -> None:
        self.socket.send_multipart([m.encoder.encode(message) for message in messages])

    def next(self, kind: type[m.FromCore]) -> m.FromCore:
        while True:
            while self.waiting:
                message = self.waiting.pop(0)
                if isinstance(message, kind):
                    return message
            assert self.socket.poll(WAIT_MS), f"no {kind.__name__} came"
            self.waiting += [m.from_core_decoder.decode(frame) for frame in self.socket.recv_multipart()]

    def close(self) -> None:
        self.context.destroy(linger=0)
        if self.core.poll() is None:
            self.core.kill()
        self.core.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, make_base(tmp_path / "tiny"))
    yield server
    server.close()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_it_serves_idles_without_work_and_ends_when_told(server: Server) -> None:
    ready = server.next(m.CoreReady)
    assert isinstance(ready, m.CoreReady) and ready.vocab_size == 256 and ready.threads == 1
    server.send(
        *(
            m.Generate(
                request=f"r{number}",
                adapter=None,
                tenant="t",
                prompt=random_prompt(number, 5),
                sampling=m.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
            )
            for number in range(2)
        )
    )
    outputs = [server.next(m.Output) for _ in range(6)]
    assert {output.request for output in outputs if isinstance(output, m.Output) and output.finish} == {"r0", "r1"}
    before = cpu_ticks(server.core.pid)
    assert not server.socket.poll(500) or server.next(m.StepStats)
    assert cpu_ticks(server.core.pid) - before < 20  # of about 50: it waits, it does not spin
    server.send(m.Shutdown())
    assert server.core.wait(timeout=20) == 0


def test_it_ends_when_the_server_is_gone(server: Server) -> None:
    server.next(m.CoreReady)
    server.socket.close(linger=0)
    assert server.core.wait(timeout=20) == 0


def test_a_base_that_cannot_load_ends_it_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Mystery"]}')
    options = msgspec.json.encode(CoreOptions(model=str(tmp_path))).decode()
    done = subprocess.run(
        [sys.executable, "-m", "loraplane_engine.core", f"ipc://{tmp_path}/core", options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "config.json" in done.stderr and "Traceback" not in done.stderr
