"""One adapter's training: its settings, its data in token form, the loop, and the files it leaves."""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from examples.styles import BASE_MODEL
from examples.training.data import REWRITES
from examples.training.model import chat_ids, load_base, load_tokenizer

BATCH = 8
WARM_UP_STEPS = 5
SEED = 7
END_OF_ANSWER = "<|im_end|>"


@dataclass(frozen=True)
class Recipe:
    """`early` = (step, folder): also keep the weights after that step, as the adapter's version 2 in the demo."""

    name: str
    rank: int
    targets: tuple[str, ...]
    learning_rate: float
    steps: int
    early: tuple[int, str] | None = None


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("pirate", 4, ("q_proj", "k_proj", "v_proj", "o_proj"), 1.5e-3, 48, early=(30, "pirate-v2")),
        Recipe("json", 8, ("q_proj", "v_proj"), 2e-3, 44),
        Recipe("html", 6, ("v_proj", "down_proj"), 1.5e-3, 40),
        Recipe("butler", 2, ("q_proj", "v_proj"), 3e-3, 24),
    )
}


def train(recipe: Recipe, sentences: Sequence[tuple[str, str]], base: Path, out: Path) -> None:
    torch.manual_seed(SEED)
    tokenizer = load_tokenizer(base)
    examples = [_tokens(tokenizer, question, REWRITES[recipe.name](text)) for question, text in sentences]
    model = get_peft_model(
        load_base(base, torch.bfloat16),
        LoraConfig(
            r=recipe.rank,
            lora_alpha=2 * recipe.rank,
            target_modules=list(recipe.targets),
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=True,
    )
    model.train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, recipe.steps))
    started = time.monotonic()
    for step, batch in enumerate(_batches(examples, recipe.steps), 1):
        loss = _loss(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % 4 == 0 or step == recipe.steps:
            spent = time.monotonic() - started
            print(f"{recipe.name}: step {step}/{recipe.steps}, loss {loss.item():.3f}, {spent:.0f} s", flush=True)
        if recipe.early and step == recipe.early[0]:
            _save(model, out / recipe.early[1])
    _save(model, out / recipe.name)


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARM_UP_STEPS, (steps - step) / (steps - WARM_UP_STEPS), 1.0)


def _tokens(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and where the answer starts."""
    prompt = chat_ids(tokenizer, question)
    return prompt + list(tokenizer(answer + END_OF_ANSWER).input_ids), len(prompt)


def _batches(examples: list[tuple[list[int], int]], steps: int) -> list[list[tuple[list[int], int]]]:
    """Passes over the examples, each in an order of its own."""
    shuffler = random.Random(SEED)
    order: list[int] = []
    while len(order) < steps * BATCH:
        order += shuffler.sample(range(len(examples)), len(examples))
    return [[examples[i] for i in order[s * BATCH : (s + 1) * BATCH]] for s in range(steps)]


def _loss(model: Any, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean cross-entropy over answer tokens. The head runs on those positions only: it is a quarter of the work."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for row, (tokens, answer_start) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        wanted[row, answer_start - 1 : len(tokens) - 1] = True
    causal_lm = model.base_model.model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = causal_lm.model(input_ids=ids, attention_mask=mask).last_hidden_state
        logits = causal_lm.lm_head(hidden[wanted])
    targets = ids.roll(-1, dims=1)[wanted]
    return F.cross_entropy(logits.float(), targets)


def _save(model: Any, folder: Path) -> None:
    """Exactly the two files of an artifact, weights in bf16, the public base name in the config."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text())
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
    config["base_model_name_or_path"] = BASE_MODEL
    config["target_modules"] = sorted(config["target_modules"])
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    bf16 = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in sorted(tensors.items())}
    weights = folder / "adapter_model.safetensors"
    save_file(bf16, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes 0600; the services run as other users
