"""The core as a process: one zmq PAIR socket to the server, one loop."""

import logging
import sys

import msgspec
import torch
import zmq

from loraplane_engine import messages as m
from loraplane_engine.core.engine import EngineCore
from loraplane_engine.core.setup import available_cpus
from loraplane_engine.options import CoreOptions

log = logging.getLogger(__name__)


class Channel:
    """The core's end of the socket. `lost` once the server has closed or dropped its end."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # the server bounds what is in flight
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.lost = False

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, wait: float | None) -> list[m.ToCore]:
        """What has arrived; waits up to `wait` seconds (None = without limit) for the first of it."""
        ready = dict(self._poller.poll(None if wait is None else round(wait * 1000)))
        if self._monitor in ready:
            self.lost = True
        messages: list[m.ToCore] = []
        while self._socket.poll(0):
            messages += [m.to_core_decoder.decode(frame) for frame in self._socket.recv_multipart()]
        return messages

    def send(self, messages: list[m.FromCore]) -> None:
        if messages:
            self._socket.send_multipart([m.encoder.encode(message) for message in messages])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=1000)  # closes the monitor's socket too, which term() would wait for


def run_core(options: CoreOptions, endpoint: str) -> None:
    """Serve until Shutdown or until the server is gone. Raises ValueError or OSError when the base cannot load."""
    torch.set_num_threads(options.threads or available_cpus())
    channel = Channel(endpoint)
    core = EngineCore(options)
    channel.watch(core.wakeup.fd)
    busy = True
    try:
        while not (core.stopping or channel.lost):
            flush(core, channel)
            for message in channel.receive(0.0 if busy else core.wait_seconds()):
                core.handle(message)
            busy = core.step()
        flush(core, channel)
    finally:
        core.close()
        channel.close()


def flush(core: EngineCore, channel: Channel) -> None:
    messages, core.outputs[:] = list(core.outputs), []
    channel.send(messages)


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s core: %(message)s")
    endpoint, encoded = arguments
    options = msgspec.json.decode(encoded, type=CoreOptions)
    try:
        run_core(options, endpoint)
    except (ValueError, OSError) as error:
        log.error("the base model cannot be served: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
