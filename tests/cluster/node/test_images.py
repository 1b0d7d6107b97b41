"""The images that ship, as real pods under a namespace that enforces `restricted`."""

import base64
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from loraplane_core.credentials import role_key
from tests.cluster.images import archive, reference
from tests.cluster.images.recipes import DEFAULT
from tests.cluster.kube import Kube
from tests.cluster.node import restricted
from tests.cluster.node.restricted import container, log, mounted_claim, pod, run, until_ready
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster
from tests.cluster.tool.controlplane import NODE_NAME

MEGABYTE = 10**6
PACKED_LIMIT = 150 * MEGABYTE
SYSTEM_SECONDS = 90.0
ENGINE_SECONDS = 90.0
#: Less than the pods' grace period, 20 s.
STOP_SECONDS = 15.0
SITE = ROOT / ".venv" / "lib" / "python3.11" / "site-packages"
MODELS = ROOT / ".loraplane" / "models"
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> dict[str, str]:
    """References by name, loaded on the node."""
    for name in DEFAULT:
        cluster.load_image(archive(name))
    return {name: reference(name) for name in DEFAULT}


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with restricted.restricted_namespace(kube) as name:
        yield name


def start(kube: Kube, namespace: str, made: dict[str, Any]) -> str:
    """The pod's path."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    kube.call("POST", pods, made)
    return f"{pods}/{made['metadata']['name']}"


@pytest.mark.parametrize("name", ["operator", "gateway"])
def test_what_is_pulled_often_is_small(name: str) -> None:
    assert archive(name).stat().st_size <= PACKED_LIMIT


@pytest.mark.parametrize("name", DEFAULT)
def test_an_image_runs_as_nobody_special_and_writes_nowhere_else(
    kube: Kube, namespace: str, images: dict[str, str], name: str
) -> None:
    """No `runAsUser` in the pod: it is the image that says 65532."""
    script = """
id -u; id -g; touch /tmp/written && echo wrote
for folder in / /etc /usr /usr/bin /opt /var/tmp /root /home; do touch "$folder/x" 2>/dev/null && echo "$folder"; done
cat /etc/pip.conf 2>/dev/null; env | grep -iE 'pip|proxy|cert|ssl'; exit 0
"""
    assert run(kube, namespace, name, images[name], "sh", "-c", script) == (0, "65532\n65532\nwrote\n")


@pytest.mark.parametrize(
    ("name", "own", "foreign"),
    [
        ("operator", ["kopf", "kubernetes.aio", "loraplane_operator.handlers"], ["fastapi", "sqlalchemy", "torch"]),
        ("gateway", ["fastapi", "psycopg", "loraplane_gateway.registry.main"], ["kopf", "kubernetes", "torch"]),
        ("engine-slim", [], ["torch", "fastapi", "kopf"]),  # core's own packages are mounted, too
    ],
)
def test_an_image_holds_its_own_packages_and_no_other_component(
    kube: Kube, namespace: str, images: dict[str, str], name: str, own: list[str], foreign: list[str]
) -> None:
    component = name.removesuffix("-slim")
    foreign = [
        *foreign,
        *(f"loraplane_{each}" for each in ("operator", "gateway", "engine", "cli") if each != component),
    ]
    script = f"""
import importlib, importlib.util, os, pwd
for each in {own}: importlib.import_module(each)
print([each for each in {foreign} if importlib.util.find_spec(each)], pwd.getpwuid(os.getuid()).pw_name)
"""
    assert run(kube, namespace, name, images[name], "python", "-c", script) == (0, "[] loraplane\n")


def test_the_operator_starts_in_its_pod_and_lives(kube: Kube, namespace: str, images: dict[str, str]) -> None:
    """With an account that may do nothing: it says so, and waits."""
    secret(kube, namespace, "keys", {"master.key": secrets.token_hex(32)})
    arguments = ["kubernetes", f"--namespace={namespace}", "--engine-image=none", "--model-claim=models"]
    arguments += ["--registry-url=http://127.0.0.1:1", "--artifacts-url=http://127.0.0.1:2"]
    arguments += ["--master-key-file=/keys/master.key", "--host=0.0.0.0", "--port=8080"]
    operator = container(
        "operator",
        images["operator"],
        args=arguments,
        volumeMounts=[{"name": "keys", "mountPath": "/keys"}],
        readinessProbe=http(8080, "/health/live"),
    )
    volumes = [{"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o440}}]
    path = start(kube, namespace, pod("operator", [operator], volumes=volumes))
    until_ready(kube, path)
    assert '"operator started"' in log(kube, path)
    stops(kube, path)


def test_the_databases_the_migration_and_both_gateways_start(
    kube: Kube, namespace: str, images: dict[str, str]
) -> None:
    """In one pod, so that they find each other without the chart: each is ready only when it answers."""
    given = entries()
    secret(kube, namespace, "all", given)
    volumes: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {}} for name in ("data", "store", "adapters", "endpoints")
    ]
    volumes.append({"name": "all", "secret": {"secretName": "all", "defaultMode": 0o440}})
    servers = [postgres(images["postgres"]), valkey(images["valkey"]), migration(images["gateway"])]
    gateways = [registry(images["gateway"]), data(images["gateway"])]
    path = start(kube, namespace, pod("all", gateways, initContainers=servers, volumes=volumes))
    until_ready(kube, path, SYSTEM_SECONDS)
    logs = {name: log(kube, path, name) for name in ("postgres", "valkey", "migrate", "registry", "data")}
    assert all(logs[name] for name in ("postgres", "valkey", "registry", "data"))
    assert [(name, key) for name, text in logs.items() for key, value in given.items() if value in text] == []
    stops(kube, path)


def test_the_engine_serves_with_its_packages_mounted(kube: Kube, namespace: str, images: dict[str, str]) -> None:
    """The command of the image, the Python environment of this checkout, the real model."""
    volumes = [
        mounted_claim(kube, namespace, "site", SITE, NODE_NAME),
        mounted_claim(kube, namespace, "models", MODELS, NODE_NAME),
    ]
    asking = "import urllib.request as r; r.urlopen('http://127.0.0.1:8002/health/ready', timeout=2)"
    engine = container(
        "engine",
        images["engine-slim"],
        command=["loraplane-engine"],
        args=[f"--model=/models/{MODEL}", "--metrics-port=8002", "--threads=1", "--device-memory=256Mi"],
        volumeMounts=[
            {"name": "site", "mountPath": "/opt/loraplane/site", "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
        ],
        readinessProbe={"exec": {"command": ["python", "-c", asking]}, "periodSeconds": 2, "timeoutSeconds": 5},
    )
    owner = SITE.stat().st_gid
    try:
        path = start(kube, namespace, pod("engine", [engine], volumes=volumes))
        until_ready(kube, path, ENGINE_SECONDS)
        assert SITE.stat().st_gid == owner
        stops(kube, path)
    finally:
        for name in ("site", "models"):
            kube.delete(f"/api/v1/persistentvolumes/{namespace}-{name}")


def stops(kube: Kube, path: str) -> None:
    """TERM reaches the processes: the pod is gone before its grace period would have ended it."""
    kube.delete(path)
    until(lambda: kube.get(path) is None, STOP_SECONDS, lambda: str(kube.get(path)), every=0.1)


def secret(kube: Kube, namespace: str, name: str, texts: dict[str, str]) -> None:
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    kube.call("POST", f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": name}, "data": encoded})


def entries() -> dict[str, str]:
    """Every secret of an installation."""
    master = secrets.token_bytes(32)
    passwords = {role: secrets.token_hex(16) for role in ("owner", "registry", "data", "valkey")}
    users = {"owner": "loraplane", "registry": "loraplane_registry", "data": "loraplane_data"}
    urls = {
        f"{role}-url": f"postgresql://{user}:{passwords[role]}@127.0.0.1:5432/loraplane" for role, user in users.items()
    }
    return {
        "master": master.hex(),
        "pepper": secrets.token_hex(32),
        "admin": secrets.token_hex(32),
        "data-key": role_key(master, "data").hex(),
        "state-key": role_key(master, "state").hex(),
        "redis-url": f"redis://:{passwords['valkey']}@127.0.0.1:6379/0",
        **{f"{role}-password": password for role, password in passwords.items()},
        **urls,
    }


ALL_SECRETS = {"name": "all", "mountPath": "/secrets", "readOnly": True}


def http(port: int, path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": 1, "failureThreshold": 60}


def command(*words: str) -> dict[str, Any]:
    return {"exec": {"command": list(words)}, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 60}


def from_secret(name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "all", "key": key}}}


def postgres(image: str) -> dict[str, Any]:
    return container(
        "postgres",
        image,
        restartPolicy="Always",  # of an init container: beside those that follow, and stopped after them
        env=[{"name": "POSTGRES_PASSWORD_FILE", "value": "/secrets/owner-password"}],
        volumeMounts=[ALL_SECRETS, {"name": "data", "mountPath": "/data"}],
        startupProbe=command("pg_isready", "-q", "-h", "127.0.0.1"),
    )


def valkey(image: str) -> dict[str, Any]:
    return container(
        "valkey",
        image,
        restartPolicy="Always",
        args=["--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl"],
        env=[{"name": "VALKEY_PASSWORD_FILE", "value": "/secrets/valkey-password"}],
        volumeMounts=[ALL_SECRETS],
        startupProbe=command("probe"),
    )


def migration(image: str) -> dict[str, Any]:
    roles = [f"--{role}-password-file=/secrets/{role}-password" for role in ("registry", "data")]
    return container(
        "migrate",
        image,
        args=["migrate", "--create-roles", *roles],
        env=[from_secret("LORAPLANE_OWNER_URL", "owner-url")],
        volumeMounts=[ALL_SECRETS],
    )


def registry(image: str) -> dict[str, Any]:
    files = {"MASTER_KEY_FILE": "master", "KEY_PEPPER_FILE": "pepper", "ADMIN_KEY_FILE": "admin"}
    plain = {"ADMIN_HOST": "0.0.0.0", "ADAPTER_ROOT": "/adapters", "STORE_DIR": "/store"}
    return container(
        "registry",
        image,
        args=["registry"],
        env=settings(files, plain, "registry-url"),
        volumeMounts=[
            ALL_SECRETS,
            {"name": "store", "mountPath": "/store"},
            {"name": "adapters", "mountPath": "/adapters"},
        ],
        readinessProbe=http(8001, "/health/ready"),
    )


def data(image: str) -> dict[str, Any]:
    files = {"KEY_PEPPER_FILE": "pepper", "DATA_KEY_FILE": "data-key", "STATE_KEY_FILE": "state-key"}
    return container(
        "data",
        image,
        args=["data"],
        env=settings(files, {"HOST": "0.0.0.0", "ENDPOINTS_DIR": "/endpoints"}, "data-url"),
        volumeMounts=[ALL_SECRETS, {"name": "endpoints", "mountPath": "/endpoints"}],
        readinessProbe=http(8000, "/health/ready"),
    )


def settings(files: dict[str, str], plain: dict[str, str], database: str) -> list[dict[str, Any]]:
    given = {**plain, **{name: f"/secrets/{key}" for name, key in files.items()}}
    found = [{"name": f"LORAPLANE_{name}", "value": value} for name, value in given.items()]
    secret_ones = {"LORAPLANE_DATABASE_URL": database, "LORAPLANE_REDIS_URL": "redis-url"}
    return [*found, *(from_secret(name, key) for name, key in secret_ones.items())]
