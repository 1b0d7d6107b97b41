"""The operator as a process: it starts, tells its health and metrics, logs JSON, and stops on SIGTERM."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from loraplane_core import credentials
from loraplane_operator import __main__ as program
from loraplane_operator import settings
from tests.operator.system import MASTER, System, adapter_manifest, pool_manifest, until


def arguments(system: System, key: Path) -> list[str]:
    return [
        "local",
        *("--folder", str(system.folder)),
        *("--state-dir", str(system.state)),
        *("--supervisor-socket", str(system.supervisor._socket)),
        *("--registry-url", system.registry.url),
        *("--master-key-file", str(key)),
        *("--artifacts-url", "http://127.0.0.1:9"),
        *("--model-root", str(system.models)),
    ]


async def surroundings(folder: Path) -> tuple[System, Path]:
    """Registry and supervisor with a tenant, and the file of the master key."""
    system = System(folder)
    key = folder / "master"
    key.write_text(MASTER.hex())
    await system.registry.start()
    await system.supervisor.start()
    await system.registry.create_tenant("acme", "default")
    return system, key


async def test_process_reconciles_tells_its_health_and_stops(tmp_path: Path) -> None:
    system, key = await surroundings(tmp_path)
    system.write("all.yaml", pool_manifest(), adapter_manifest())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplane_operator", *arguments(system, key)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            first = json.loads(await process.stderr.readline())
        assert (first["message"], first["level"]) == ("operator started", "info")
        url = f"http://127.0.0.1:{first['health_port']}"
        await until(system.ready, seconds=10)
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/health/live")).status_code == 200
            assert (await http.get(f"{url}/health/ready")).status_code == 200
            exposed = (await http.get(f"{url}/metrics")).text
        assert 'loraplane_operator_actions_total{action="Warm",outcome="ok"} 1.0' in exposed
        assert 'loraplane_operator_phase_seconds_count{phase="plan"}' in exposed
        assert "acme" not in exposed
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, rest = await process.communicate()
        await system.supervisor.stop()
        await system.registry.stop()
    assert process.returncode == 0
    lines = [json.loads(line) for line in rest.decode().splitlines()]
    assert lines[-1]["message"] == "operator stopped"
    (warmed,) = [line for line in lines if line.get("action") == "Warm"]
    assert warmed["replica"].startswith("default/pool/")
    assert warmed["adapter"].startswith("acme/pirate@1#")
    assert credentials.operator_credential(MASTER) not in rest.decode()


@pytest.mark.parametrize("content", ["", "not hex", "00ff"])
def test_bad_master_key_stops_the_start(tmp_path: Path, content: str) -> None:
    key = tmp_path / "master"
    key.write_text(content)
    system = System(tmp_path)
    assert program.main(arguments(system, key)) == 2


def test_bad_url_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = System(tmp_path)
    wrong = ["ftp://x" if each == system.registry.url else each for each in arguments(system, tmp_path)]
    with pytest.raises(SystemExit):
        program.parse(wrong)
    assert "--registry-url must be an http or https URL" in capsys.readouterr().err


KUBERNETES = [
    "kubernetes",
    *("--registry-url", "http://r", "--artifacts-url", "http://a", "--master-key-file", "/k"),
    *("--namespace", "a", "--namespace", "b", "--engine-image", "e:1", "--model-claim", "models"),
]


@pytest.mark.parametrize("pools", [(), ("b",), ("b", "a")])
def test_kubernetes_mode_reads_its_namespaces(pools: tuple[str, ...]) -> None:
    made = program.parse([*KUBERNETES, *(f"--pool-namespace={name}" for name in pools)])
    assert isinstance(made, settings.Kubernetes)
    assert (made.namespaces, made.pool_namespaces) == (("a", "b"), pools)


def test_pools_cannot_be_honoured_where_nothing_is_observed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse([*KUBERNETES, "--pool-namespace", "c"])
    assert "--pool-namespace c: not among the --namespace" in capsys.readouterr().err


async def test_stop_lets_what_runs_finish_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """An engine that never answers holds up the stop for its grace, but not a second signal."""
    system, key = await surroundings(tmp_path)
    system.write("all.yaml", pool_manifest(replicas=1))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplane_operator", *arguments(system, key)), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: system.condition("basemodelpool", "pool", "Available")[0] == "True", seconds=20)
        system.engine(0).hang = True
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: ("PUT", "acme/pirate@1") in system.engine(0).calls, seconds=10)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await process.wait()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(2):
            assert await process.wait() == -signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await system.supervisor.stop()
        await system.registry.stop()


async def test_process_is_killed_at_the_point_that_a_test_names_and_the_next_start_mends_it(tmp_path: Path) -> None:
    system, key = await surroundings(tmp_path)
    system.write("all.yaml", pool_manifest(replicas=1), adapter_manifest())
    codes = []
    try:
        for fault in ("after/Register", "after/Warm", ""):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loraplane_operator", *arguments(system, key)),
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "LORAPLANE_FAULT": fault},
            )
            if not fault:
                await until(system.ready, seconds=15)
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                codes.append(await process.wait())
    finally:
        await system.supervisor.stop()
        await system.registry.stop()
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert len(next(iter(system.registry.adapters.values())).versions) == 1


def test_fault_that_does_not_exist_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "master"
    key.write_text(MASTER.hex())
    key.chmod(0o600)
    monkeypatch.setenv("LORAPLANE_FAULT", "after/lunch")
    assert program.main(arguments(System(tmp_path), key)) == 2
