"""What runs beside the cluster in a test: real Postgres, the registry and a data gateway, as real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg

from loraplane_cli.supervisor.material import Material, load_material
from loraplane_core.process import die_with_parent
from loraplane_gateway.db.migrate import migrate
from loraplane_gateway.db.roles import DATA_ROLE, REGISTRY_ROLE, create_roles
from tests.gateway.postgres import PostgresServer, free_port, running_postgres

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 15.0
_DATABASE = "loraplane"
_OWNER = "loraplane_owner"
T = TypeVar("T")


def until(holds: Callable[[], T], seconds: float, what: str | Callable[[], str] = "", every: float = 0.03) -> T:
    """Wait for a condition with a deadline; returns what made it true."""
    deadline = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(every)


class Process:
    """A child that dies with the test process, whatever ends that. Start it from the main thread."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, env: Mapping[str, str]) -> None:
        assert not self.running(), f"{self.name} runs already"
        base = {"PATH": os.environ.get("PATH", os.defpath), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**base, **env},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} was not started"
        return self._child.pid

    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def signal(self, signum: int) -> None:
        assert self._child is not None
        self._child.send_signal(signum)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        assert self._child is not None
        return self._child.wait(timeout=seconds)

    def kill(self) -> None:
        """kill -9."""
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(timeout=STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM and its exit status."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        return 0 if self._child is None else self._child.returncode

    def rss(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def tail(self, characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""


class Services:
    """Ports stay over restarts, since others know them."""

    def __init__(self, postgres: PostgresServer, folder: Path) -> None:
        self.folder = folder
        self.adapter_root = folder / "adapters"
        self.endpoints = folder / "kubelet" / "endpoints"
        for made in (self.adapter_root, self.endpoints, folder / "store", folder / "secrets"):
            made.mkdir(parents=True, mode=0o700)
        self.material: Material = load_material(folder / "secrets")
        self._postgres = postgres
        self.owner_url = _database(postgres, self.material)
        self._admin, self._artifacts, self._data = free_port(), free_port(), free_port()
        self.registry = Process("registry", folder)
        self.gateway = Process("gateway", folder)
        self._http = httpx.Client(timeout=30, trust_env=False)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self._admin}"

    @property
    def artifacts_url(self) -> str:
        return f"http://127.0.0.1:{self._artifacts}"

    @property
    def data_url(self) -> str:
        return f"http://127.0.0.1:{self._data}"

    def start_registry(self) -> None:
        settings = {
            "DATABASE_URL": self._url(REGISTRY_ROLE, self.material.registry_password),
            "MASTER_KEY_FILE": str(self.material.master_file),
            "KEY_PEPPER_FILE": str(self.material.pepper_file),
            "ADMIN_KEY_FILE": str(self.material.admin_key_file),
            "ADMIN_PORT": str(self._admin),
            "ARTIFACT_PORT": str(self._artifacts),
            "ADAPTER_ROOT": str(self.adapter_root),
            "STORE_DIR": str(self.folder / "store"),
        }
        self.registry.start("loraplane_gateway", "registry", env=_prefixed(settings))
        self._until_ready(self.registry, self._admin)

    def start_gateway(self) -> None:
        settings = {
            "DATABASE_URL": self._url(DATA_ROLE, self.material.data_password),
            "KEY_PEPPER_FILE": str(self.material.pepper_file),
            "DATA_KEY_FILE": str(self.material.data_key_file),
            "STATE_KEY_FILE": str(self.material.state_key_file),
            "ENDPOINTS_DIR": str(self.endpoints),
            "PORT": str(self._data),
        }
        self.gateway.start("loraplane_gateway", "data", env=_prefixed(settings))
        self._until_ready(self.gateway, self._data)

    def close(self) -> None:
        self.gateway.kill()
        self.registry.kill()
        self._http.close()

    # -- admin REST

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(
            method, f"{self.admin_url}{path}", json=body, headers={"authorization": f"Bearer {self.material.admin_key}"}
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def tenant(self, name: str, *namespaces: str) -> None:
        self.admin("POST", "/admin/tenants", {"name": name, "namespaces": list(namespaces)})

    def key(self, tenant: str) -> str:
        return str(self.admin("POST", f"/admin/tenants/{tenant}/keys", {"name": "tests"})["secret"])

    def ask(self, key: str, model: str, **body: Any) -> httpx.Response:
        """One short completion through the data gateway."""
        request = {"model": model, "prompt": "Hello", "max_tokens": 4, **body}
        headers = {"authorization": f"Bearer {key}"}
        return self._http.post(f"{self.data_url}/v1/completions", json=request, headers=headers)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What lies in Postgres, as its owner sees it."""
        with psycopg.connect(self.owner_url) as connection:
            return connection.execute(query, values).fetchall()

    # -- inside

    def _url(self, role: str, password: str) -> str:
        return self._postgres.url(_DATABASE, role, password)

    def _until_ready(self, process: Process, port: int) -> None:
        def ready() -> bool:
            assert process.running(), f"{process.name} ended:\n{process.tail()}"
            with contextlib.suppress(httpx.HTTPError):
                return self._http.get(f"http://127.0.0.1:{port}/health/ready").is_success
            return False

        until(ready, START_SECONDS, process.tail)


def _database(postgres: PostgresServer, material: Material) -> str:
    """One migrated database; its owner's URL."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {_OWNER} LOGIN CREATEROLE PASSWORD 'owner'")
        connection.execute(f"CREATE DATABASE {_DATABASE} OWNER {_OWNER}")
    owner_url = postgres.url(_DATABASE, _OWNER, "owner")
    create_roles(owner_url, registry_password=material.registry_password, data_password=material.data_password)
    migrate(owner_url)
    return owner_url


def _prefixed(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"LORAPLANE_{name}": value for name, value in settings.items()}


@contextlib.contextmanager
def running_services(folder: Path) -> Iterator[Services]:
    with running_postgres() as postgres:
        services = Services(postgres, folder)
        try:
            services.start_registry()
            services.start_gateway()
            yield services
        finally:
            services.close()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
