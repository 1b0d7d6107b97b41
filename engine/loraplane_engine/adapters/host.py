"""The host tier: engine images copied from disk into host memory, off the step loop, within a byte budget."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from loraplane_engine.adapters.image import Manifest, read_data


class HostImage(NamedTuple):
    manifest: Manifest
    data: torch.Tensor  # uint8, pinned when the device is a GPU


class HostLoader:
    """One reading thread. `wake` is called from it when a load has ended; `finished` hands the results out."""

    def __init__(self, *, pin: bool, wake: Callable[[], None]) -> None:
        self._pin, self._wake = pin, wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="image-loader")
        self._done: deque[tuple[str, Future[HostImage]]] = deque()
        self.pending = 0

    def start(self, digest: str, path: Path, manifest: Manifest, data_start: int) -> None:
        self.pending += 1
        future = self._pool.submit(self._read, path, manifest, data_start)
        future.add_done_callback(lambda done: self._finish(digest, done))

    def finished(self) -> list[tuple[str, Future[HostImage]]]:
        ended = []
        while self._done:
            ended.append(self._done.popleft())
        self.pending -= len(ended)
        return ended

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self, digest: str, future: Future[HostImage]) -> None:
        self._done.append((digest, future))
        self._wake()

    def _read(self, path: Path, manifest: Manifest, data_start: int) -> HostImage:
        data = torch.empty(manifest.data_bytes, dtype=torch.uint8, pin_memory=self._pin)
        read_data(path, manifest, data_start, data.numpy().data)
        return HostImage(manifest, data)


class Wakeup:
    """A file descriptor that becomes readable when `set` is called from another thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
