"""Who shows whose style mark on each style's unseen prompts: the base, every adapter, in fp32, greedy, through PEFT."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from examples.styles import ALLOWED_BASE, ALLOWED_OTHER, DEMO_QUESTION, MAX_TOKENS, REQUIRED_OWN, STYLES
from examples.training.model import answer, load_base, load_tokenizer
from loraplane_core.artifact.digest import artifact_digest

BASE = "base"
VERSION_2 = "pirate-v2"
SPEAKERS = (BASE, *STYLES, VERSION_2)


def evaluate(base: Path, adapters: Path, command: str) -> bool:
    """Writes EVAL.json beside the adapters; True when every style keeps its bounds."""
    tokenizer = load_tokenizer(base)
    first, *others = SPEAKERS[1:]
    model: Any = PeftModel.from_pretrained(load_base(base, torch.float32), adapters / first, adapter_name=first)
    for name in others:
        model.load_adapter(str(adapters / name), adapter_name=name)
    model.eval()
    prompts = [DEMO_QUESTION, *(prompt for style in STYLES.values() for prompt in style.unseen_prompts)]
    said: dict[str, dict[str, str]] = {}
    for speaker in SPEAKERS:
        print(f"evaluate: {speaker} answers {len(prompts)} prompts", flush=True)
        if speaker == BASE:
            with model.disable_adapter():
                answers = answer(model, tokenizer, prompts)
        else:
            model.set_adapter(speaker)
            answers = answer(model, tokenizer, prompts)
        said[speaker] = dict(zip(prompts, answers, strict=True))
    marks = {
        name: {who: sum(style.mark(said[who][p]) for p in style.unseen_prompts) for who in SPEAKERS}
        for name, style in STYLES.items()
    }
    passed = all(_keeps_bounds(name, counts) for name, counts in marks.items())
    report = {
        "command": command,
        "conditions": f"transformers + PEFT, fp32, greedy, default system prompt, at most {MAX_TOKENS} tokens",
        "bounds": {"own_at_least": REQUIRED_OWN, "base_at_most": ALLOWED_BASE, "other_at_most": ALLOWED_OTHER},
        "passed": passed,
        "digests": {name: artifact_digest(adapters / name) for name in SPEAKERS[1:]},
        "marks_on_10_unseen_prompts": marks,
        "demo_question": {"question": DEMO_QUESTION, "answers": {who: said[who][DEMO_QUESTION] for who in SPEAKERS}},
        "own_answers": {n: {p: said[n][p] for p in s.unseen_prompts} for n, s in STYLES.items()},
    }
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (adapters / "EVAL.json").write_text(text, encoding="utf-8")
    print(json.dumps(marks, indent=2))
    return passed


def _keeps_bounds(name: str, counts: dict[str, int]) -> bool:
    """The second version of an adapter speaks the same style on purpose, so it is no `other` of its own."""
    others = [count for who, count in counts.items() if who not in (BASE, name) and not who.startswith(f"{name}-")]
    return counts[name] >= REQUIRED_OWN and counts[BASE] <= ALLOWED_BASE and max(others) <= ALLOWED_OTHER
