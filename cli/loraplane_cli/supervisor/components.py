"""The processes of one machine, in the order in which each finds what it needs already there."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from loraplane_cli.errors import LocalError, StartFailed
from loraplane_cli.supervisor.keeper import Component, Stops
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.material import Material
from loraplane_cli.supervisor.ports import LOOPBACK, PortBook, is_free
from loraplane_cli.supervisor.postgres import DATABASE, Postgres, layout_of, prepare
from loraplane_cli.supervisor.probes import blocking, http_ready
from loraplane_cli.supervisor.spec import ProcessSpec
from loraplane_cli.supervisor.valkey import Valkey, find_binary

DEFAULT_GATEWAY_PORT = 8080
#: A look at Postgres costs it a process.
SERVER_PROBE_SECONDS = 15.0
REGISTRY_ROLE = "loraplane_registry"
DATA_ROLE = "loraplane_data"
#: What a child inherits of our environment; everything else it gets by name.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR")
MODULES = {"gateway": "loraplane_gateway", "operator": "loraplane_operator"}


@dataclass(frozen=True)
class Options:
    """What `loraplane up` was asked for."""

    folder: Path
    adapter_root: Path
    model_root: Path
    data_replicas: int = 1
    port: int | None = None  # of the first data gateway; None: the one of last time, 8080, or any


@dataclass(frozen=True)
class Urls:
    gateways: tuple[str, ...]
    admin: str
    artifacts: str
    database: str
    redis: str


@dataclass(frozen=True)
class Kit:
    """What the parts of a system are made from."""

    options: Options
    state: StateFolder
    ports: PortBook
    material: Material
    env: Mapping[str, str]
    client: httpx.AsyncClient
    notes: list[str] = field(default_factory=list)  # what a person should be told


class Parts(Protocol):
    """A system to supervise."""

    def groups(self) -> list[list[Component]]:
        """What starts side by side; a group begins when the one before it is ready."""
        ...

    def urls(self) -> Urls:
        """Where everything answers; known once the services run."""
        ...


class System:
    """The real one: Postgres, Valkey, both gateways, the operator. Ports stay for a whole run: others know them."""

    def __init__(self, kit: Kit) -> None:
        self._options = kit.options
        self._state = kit.state
        self._ports = kit.ports
        self._material = kit.material
        self._env = kit.env
        self._client = kit.client
        self._notes = kit.notes
        self._postgres: Postgres | None = None
        self._valkey: Valkey | None = None
        self._port_of: dict[str, int] = {}

    def groups(self) -> list[list[Component]]:
        gateways = [self._data(number) for number in range(self._options.data_replicas)]
        return [
            [self._postgres_component(), self._valkey_component()],
            [self._migrate()],
            [self._registry(), *gateways, self._operator()],
        ]

    def _operator(self) -> Component:
        probe = http_ready(self._client, lambda: self._port("operator"), "/health/ready")
        return Component("operator", self._operator_spec, probe, stops="first")

    def urls(self) -> Urls:
        """Where everything answers now; after a restart a port may have moved."""
        if self._postgres is None or self._valkey is None:
            raise LocalError("the databases are not prepared yet")
        return Urls(
            gateways=tuple(self._url(f"gateway-{number}") for number in range(self._options.data_replicas)),
            admin=self._url("admin"),
            artifacts=self._url("artifacts"),
            database=self._postgres.owner_url,
            redis=self._valkey.url,
        )

    def _postgres_component(self) -> Component:
        def prepare_cluster() -> None:
            state = self._state
            layout = layout_of(state.root, logs=state.logs, secrets_folder=state.secrets, shared_name=state.shared_name)
            self._postgres = prepare(layout, self._ports)

        return Component(
            "postgres",
            lambda: self._need_postgres().spec(self._marker()),
            blocking(lambda: self._need_postgres().accepting()),
            prepare=prepare_cluster,
            settle=lambda: self._need_postgres().ensure_database(),
            probe_seconds=SERVER_PROBE_SECONDS,
        )

    def _valkey_component(self) -> Component:
        def make() -> ProcessSpec:
            return self._need_valkey().spec(self._marker())

        def prepare_server() -> None:
            self._valkey = Valkey(find_binary(), self._port("valkey"), self._material.valkey_password)

        return Component(
            "valkey",
            make,
            blocking(lambda: self._need_valkey().accepting()),
            prepare=prepare_server,
            start_seconds=20,
            probe_seconds=SERVER_PROBE_SECONDS,
        )

    def _migrate(self) -> Component:
        def make() -> ProcessSpec:
            return self._python(
                "migrate",
                "gateway",
                "migrate",
                "--create-roles",
                *("--registry-password-file", str(self._material.registry_password_file)),
                *("--data-password-file", str(self._material.data_password_file)),
                env={"OWNER_URL": self._need_postgres().owner_url},  # an argument would show the password
            )

        return Component("migrate", make, None, start_seconds=120)

    def _registry(self) -> Component:
        def make() -> ProcessSpec:
            admin, artifacts = self._port("admin"), self._port("artifacts")
            return self._python(
                "registry",
                "gateway",
                "registry",
                env={
                    "DATABASE_URL": self._database_url(REGISTRY_ROLE, self._material.registry_password),
                    "REDIS_URL": self._need_valkey().url,
                    "MASTER_KEY_FILE": str(self._material.master_file),
                    "KEY_PEPPER_FILE": str(self._material.pepper_file),
                    "ADMIN_KEY_FILE": str(self._material.admin_key_file),
                    "ADMIN_HOST": LOOPBACK,
                    "ADMIN_PORT": str(admin),
                    "ARTIFACT_HOST": LOOPBACK,
                    "ARTIFACT_PORT": str(artifacts),
                    "ADAPTER_ROOT": str(self._options.adapter_root),
                    "STORE_DIR": str(self._state.store),
                },
            )

        return self._server("registry", make, "admin")

    def _data(self, number: int) -> Component:
        name = f"gateway-{number}"

        def make() -> ProcessSpec:
            return self._python(
                name,
                "gateway",
                "data",
                env={
                    "DATABASE_URL": self._database_url(DATA_ROLE, self._material.data_password),
                    "REDIS_URL": self._need_valkey().url,
                    "KEY_PEPPER_FILE": str(self._material.pepper_file),
                    "DATA_KEY_FILE": str(self._material.data_key_file),
                    "STATE_KEY_FILE": str(self._material.state_key_file),
                    "ENDPOINTS_DIR": str(self._state.endpoints),
                    "HOST": LOOPBACK,
                    "PORT": str(self._gateway_port(number)),
                    "METRICS_PORT": str(self._port(f"{name}-metrics")),
                    "DRAIN_TIMEOUT": "5",
                },
            )

        return self._server(name, make, name, stops="edge")

    def _server(
        self, name: str, make: Callable[[], ProcessSpec], port_name: str, *, stops: Stops = "last"
    ) -> Component:
        def port() -> int:
            return self._port(port_name)

        return Component(name, make, http_ready(self._client, port, "/health/ready"), port=port, stops=stops)

    def _operator_spec(self) -> ProcessSpec:
        return self._python(
            "operator",
            "operator",
            "local",
            *("--folder", str(self._options.folder)),
            *("--state-dir", str(self._state.root)),
            *("--supervisor-socket", str(self._state.socket)),
            *("--registry-url", self._url("admin")),
            *("--master-key-file", str(self._material.master_file)),
            *("--artifacts-url", self._url("artifacts")),
            *("--model-root", str(self._options.model_root)),
            *("--port", str(self._port("operator"))),
        )

    def _python(self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> ProcessSpec:
        settings = {f"LORAPLANE_{key}": value for key, value in (env or {}).items()}
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-P", "-m", MODULES[module], *arguments),
            env={**self._env, "OMP_NUM_THREADS": "1", **settings},
            cwd=self._state.root,
        )

    def _gateway_port(self, number: int) -> int:
        if number > 0:
            return self._port(f"gateway-{number}")
        wished = self._options.port
        if wished is not None and "gateway-0" not in self._port_of and not is_free(wished):
            raise StartFailed(f"port {wished} is taken; choose another --port", code="port_taken")
        expected = wished or self._ports.stored("gateway-0") or DEFAULT_GATEWAY_PORT
        port = self._port("gateway-0", preferred=wished, default=DEFAULT_GATEWAY_PORT)
        if port != expected:
            self._notes.append(f"port {expected} is taken; the OpenAI API is on {port}")
        return port

    def _port(self, name: str, preferred: int | None = None, default: int | None = None) -> int:
        if name not in self._port_of:
            self._port_of[name] = self._ports.assign(name, preferred, default)
        return self._port_of[name]

    def _url(self, name: str) -> str:
        return f"http://{LOOPBACK}:{self._port(name)}"

    def _database_url(self, role: str, password: str) -> str:
        return f"postgresql://{role}:{password}@{LOOPBACK}:{self._need_postgres().port}/{DATABASE}"

    def _marker(self) -> dict[str, str]:
        """What Postgres and Valkey, which get a clean environment, must carry."""
        return {name: value for name, value in self._env.items() if name == "LORAPLANE_RUN"}

    def _need_postgres(self) -> Postgres:
        if self._postgres is None:
            raise StartFailed("postgres is not prepared")
        return self._postgres

    def _need_valkey(self) -> Valkey:
        if self._valkey is None:
            raise StartFailed("valkey is not prepared")
        return self._valkey


def child_environment(extra: Mapping[str, str], inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of Loraplane's own children: none of the caller's LORAPLANE_ variables, no proxies."""
    return {name: inherited[name] for name in INHERITED if name in inherited} | dict(extra)
