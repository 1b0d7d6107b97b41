"""Where everything of one local installation lies."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from loraplane_cli.errors import LocalError
from loraplane_cli.supervisor.files import private_folder
from loraplane_core.identity import PoolRef, ReplicaId

STATE_FOLDER = ".loraplane"


@dataclass(frozen=True)
class StateFolder:
    """The state folder (`.loraplane`), and what is outside it because of path lengths or permissions."""

    root: Path

    @classmethod
    def of(cls, path: Path) -> "StateFolder":
        return cls(path.absolute())

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def objects(self) -> Path:
        """Objects with their status, written by the operator."""
        return self.root / "objects"

    @property
    def events(self) -> Path:
        """Events of the objects, one JSON line each, written by the operator."""
        return self.root / "events.jsonl"

    @property
    def problems(self) -> Path:
        """What is in the watched folder and not in force, written by the operator."""
        return self.root / "problems.json"

    @property
    def store(self) -> Path:
        """The artifact store."""
        return self.root / "store"

    @property
    def desired(self) -> Path:
        """The watched folder when `up` is given none."""
        return self.root / "desired"

    @property
    def env(self) -> Path:
        return self.root / "env"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def run(self) -> Path:
        """What the running supervisor started; what a killed one left."""
        return self.root / "run.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def ports(self) -> Path:
        return self.root / "ports.json"

    def cache(self, replica: ReplicaId) -> Path:
        return self.root / "cache" / f"{replica.namespace}.{replica.pod}"

    def credentials(self, pool: PoolRef) -> Path:
        return self.secrets / "engines" / f"{pool.namespace}.{pool.name}.json"

    def endpoint(self, replica: ReplicaId) -> Path:
        return self.endpoints / f"{replica.namespace}.{replica.pod}.json"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def token(self) -> str:
        """Names this installation's folders outside the state folder: the same path, the same name."""
        return hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]

    @property
    def shared_name(self) -> str:
        return f"loraplane-{os.geteuid()}-{self.token}"

    @property
    def runtime(self) -> Path:
        """A short, private folder for sockets (a state folder may lie too deep for one) and for temporary files."""
        return Path("/tmp") / self.shared_name  # noqa: S108 - its owner and mode are checked when it is entered

    @property
    def socket(self) -> Path:
        return self.runtime / "supervisor.sock"

    def create(self) -> None:
        """Make the folders that must exist before anything runs. Raises LocalError."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"cannot make the state folder {self.root}: {error.strerror}") from error
        for folder in (self.secrets, self.secrets / "engines", self.secrets / "tenants", self.logs, self.runtime):
            private_folder(folder)
        for folder in (self.models, self.endpoints, self.objects, self.store, self.root / "cache"):
            folder.mkdir(exist_ok=True)

    def remove_runtime(self) -> None:
        if self.runtime.exists():
            shutil.rmtree(self.runtime)
