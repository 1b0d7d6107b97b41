"""The base model for training and evaluation: loading, greedy chat answers, the answers that training starts from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from examples.styles import MAX_TOKENS
from examples.training.data import QUESTIONS, first_sentence

ANSWER_BATCH = 48
BASE_ANSWERS = Path(__file__).with_name("base_answers.json")


def load_base(folder: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text).input_ids)


@torch.inference_mode()
def answer(model: Any, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[str]:
    """Greedy answers of at most MAX_TOKENS tokens, in the order of the questions."""
    answers: list[str] = []
    for start in range(0, len(questions), ANSWER_BATCH):
        prompts = [chat_ids(tokenizer, question) for question in questions[start : start + ANSWER_BATCH]]
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        out = model.generate(**batch, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in answers]


def write_base_answers(folder: Path) -> None:
    print(f"answering {len(QUESTIONS)} questions with the base model", flush=True)
    answers = answer(load_base(folder, torch.float32), load_tokenizer(folder), QUESTIONS)
    text = json.dumps(dict(zip(QUESTIONS, answers, strict=True)), indent=1, ensure_ascii=False) + "\n"
    BASE_ANSWERS.write_text(text, encoding="utf-8")


def training_sentences() -> list[tuple[str, str]]:
    """(question, first sentence of the base's own answer). The answers are checked in: the data does not move."""
    answers = json.loads(BASE_ANSWERS.read_text(encoding="utf-8"))
    return [(question, sentence) for question in QUESTIONS if (sentence := first_sentence(answers[question]))]
