"""The standalone engine as people start it, with the real model and the official client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from loraplane_engine.server.core_process import sweep

ROOT = Path(__file__).parents[3]
MODEL = ROOT / ".loraplane" / "models" / "smollm2-135m-instruct"
BASE = MODEL.name


def make_adapter(folder: Path, seed: int, rank: int) -> Path:
    """Random, and large enough to change what the model says."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(30):
        for module, out in (("q_proj", 576), ("v_proj", 192)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = (random.standard_normal((rank, 576)) * 0.1).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (random.standard_normal((out, rank)) * 0.1).astype(np.float32)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Standalone:
    process: subprocess.Popen[bytes]
    url: str
    metrics_url: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "loraplane_engine", "--model", str(MODEL), "--port", "0", "--metrics-port", "0"]
    command += ["--ports-file", str(folder / "ports.json"), "--max-model-len", "512", "--threads", "1", *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stderr=log, stdout=log, process_group=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    assert (MODEL / "model.safetensors").exists(), "the base model is not there: run `make model`"
    folder = tmp_path_factory.mktemp("standalone")
    adapters = [f"a{rank}={make_adapter(folder / f'a{rank}', rank, rank)}" for rank in (4, 16)]
    process = start(folder, *(part for adapter in adapters for part in ("--adapter", adapter)))
    try:
        ports = wait_for_ports(folder, process)
        yield Standalone(
            process, f"http://127.0.0.1:{ports['data']}", f"http://127.0.0.1:{ports['metrics']}", folder / "log"
        )
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, (folder / "log").read_text()


def wait_for_ports(folder: Path, process: subprocess.Popen[bytes], seconds: float = 90) -> dict[str, int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, (folder / "log").read_text()
        if (folder / "ports.json").exists():
            ports: dict[str, int] = json.loads((folder / "ports.json").read_text())
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{ports['data']}/health/ready", timeout=5).close()
                return ports
            except urllib.error.URLError:
                pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {seconds} s: {(folder / 'log').read_text()}")


def test_models_gives_each_adapter_its_parent(engine: Standalone) -> None:
    models = {model.id: model.model_extra or {} for model in engine.client.models.list()}
    assert {name: extra["parent"] for name, extra in models.items()} == {BASE: None, "a4": BASE, "a16": BASE}
    assert engine.client.models.retrieve("a4").id == "a4"


def test_a_completion_makes_sense_and_each_adapter_differs(engine: Standalone) -> None:
    texts = {}
    for model in (BASE, "a4", "a16"):
        answer = engine.client.completions.create(
            model=model, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1
        )
        assert answer.model == model
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
        assert answer.choices[0].finish_reason == "length"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or []) == answer.choices[0].text
        texts[model] = answer.choices[0].text
    assert "Paris" in texts[BASE]
    assert len(set(texts.values())) == 3


def test_chat_streams_the_same_words_as_it_answers(engine: Standalone) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2+2?"}]
    whole = engine.client.chat.completions.create(model=BASE, messages=messages, max_tokens=12, temperature=0)
    stream = engine.client.chat.completions.create(
        model=BASE,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "4" in text
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 5


def test_chat_ends_at_the_model_s_own_end(engine: Standalone) -> None:
    answer = engine.client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "Say only the word yes."}], max_tokens=60, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_a_stop_string_is_not_shown(engine: Standalone) -> None:
    answer = engine.client.completions.create(
        model=BASE, prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop=[" 7"]
    )
    assert answer.choices[0].text == " 5, 6,"
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_n_differ(engine: Standalone) -> None:
    first, second = (
        engine.client.completions.create(model=BASE, prompt="Once", max_tokens=6, n=2, seed=5, temperature=1.0)
        for _ in range(2)
    )
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text


def test_echo_with_logprobs_scores_the_prompt(engine: Standalone) -> None:
    answer = engine.client.completions.create(
        model=BASE, prompt="The capital of France", max_tokens=1, temperature=0, echo=True, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text.startswith("The capital of France")
    assert (logprobs.token_logprobs or [0])[0] is None
    assert len(logprobs.tokens or []) == 5
    assert "".join(logprobs.tokens or []) == answer.choices[0].text


def test_errors_are_the_client_s_own_classes(engine: Standalone) -> None:
    client = engine.client
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="a5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=BASE, prompt="word " * 600)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=BASE, prompt="x", temperature=5)
    assert wrong.value.param == "temperature"


async def test_three_models_at_once_share_steps(engine: Standalone) -> None:
    client = openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0, timeout=60)
    async with client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model=model,
                    prompt="Once upon a time",
                    max_tokens=24,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for model in (BASE, "a4", "a16") * 2
            )
        )
    assert len({answer.choices[0].text for answer in answers}) == 3
    text = await asyncio.to_thread(read, f"{engine.metrics_url}/metrics")
    assert "loraplane_engine_adapters_per_step_max 2.0" in text
    assert 'loraplane_engine_adapter_tokens_total{adapter="a4",tenant="local"}' in text
    assert "loraplane_engine_padded_tokens_total 0.0" in text


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
    return text


def test_no_prompt_is_logged(engine: Standalone) -> None:
    canary = "xyzzy canary 4711"
    engine.client.completions.create(model=BASE, prompt=canary, max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        engine.client.completions.create(model=BASE, prompt=canary * 200)
    assert "canary" not in engine.log.read_text()


def test_an_adapter_of_another_base_stops_the_start(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "other", 1, 4)
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, dtype=np.float32)
        for side, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    process = start(tmp_path, "--adapter", f"other={folder}")
    assert process.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert "--adapter other" in log
    assert "shape_mismatch" in log


def test_a_killed_server_takes_its_core_with_it(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        core = wait_for(lambda: child_of(process.pid))
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not runs(core))
    left = list(Path(tempfile.gettempdir()).glob(f"lpe-{process.pid}-*"))
    assert len(left) == 1
    sweep(Path(tempfile.gettempdir()))  # what the next engine does first
    assert not left[0].exists()


def test_ctrl_c_in_its_terminal_ends_it_without_a_traceback(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        wait_for_ports(tmp_path, process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()


def child_of(pid: int) -> int:
    """0 while there is none."""
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or 0)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Found = TypeVar("Found")


def wait_for(condition: Callable[[], Found], seconds: float = 20) -> Found:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found
