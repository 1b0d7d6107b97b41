"""What residency keeps: bytes per digest (`Image`), marks and users per id (`Adapter`)."""

from dataclasses import dataclass, field

from loraplane_engine.adapters.host import HostImage
from loraplane_engine.adapters.image import Manifest
from loraplane_engine.messages import AdapterKey


@dataclass(slots=True, eq=False)
class Image:
    digest: str
    manifest: Manifest
    adapters: "dict[AdapterKey, Adapter]" = field(default_factory=dict)
    host: HostImage | None = None  # None while it is being read
    row: int | None = None  # of the device table; None = not on the device
    device_pages: list[int] = field(default_factory=list)
    running: set[str] = field(default_factory=set)  # request ids in the running set
    running_since: float = 0.0  # when that set was last filled from empty
    last_used: float = 0.0
    kept_until: float = 0.0  # not yet used: for whom it was loaded comes a moment later

    @property
    def pages(self) -> int:
        return self.manifest.pages

    @property
    def bytes(self) -> int:
        return self.manifest.data_bytes

    @property
    def pinned(self) -> bool:
        return any(adapter.pinned for adapter in self.adapters.values())

    @property
    def warm_wanted(self) -> bool:
        return any(adapter.warm_wanted for adapter in self.adapters.values())

    @property
    def busy(self) -> bool:
        """It cannot leave the host tier now."""
        return self.host is None or any(
            adapter.requests or adapter.drain_until is not None for adapter in self.adapters.values()
        )

    def ids(self) -> "list[Adapter]":
        return [self.adapters[key] for key in sorted(self.adapters, key=lambda key: key.ref)]


@dataclass(slots=True, eq=False)
class Adapter:
    key: AdapterKey
    image: Image
    pinned: bool = False
    warm_wanted: bool = False
    requests: set[str] = field(default_factory=set)  # queued or running
    drain_until: float | None = None  # set = unloading


@dataclass(frozen=True, slots=True)
class Limits:
    budget_pages: int
    host_bytes: int
    slots: int | None
    max_rank: int
