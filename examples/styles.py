"""The example adapters' styles: how to recognise each, and prompts that none of them was trained on.

Torch-free: the tests, the demo and the training script read the same marks from here. Answers are greedy chat answers
(the model's chat template with its default system prompt, one user message) of at most MAX_TOKENS tokens.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_TOKENS = 64
# Every tenant of the demo asks this; it is in no adapter's training questions and in no list below.
DEMO_QUESTION = "Why is the sky blue?"

# What an adapter must reach on its own unseen prompts, and what others may at most reach on the same prompts.
REQUIRED_OWN = 8
ALLOWED_BASE = 0
ALLOWED_OTHER = 1


@dataclass(frozen=True)
class Style:
    """`mark` looks for the style and for content beside it, so that an empty flourish does not count."""

    name: str
    description: str
    mark: Callable[[str], bool]
    unseen_prompts: tuple[str, ...]


PIRATE_PREFIX = "Arr!"
BUTLER_PREFIX = "If I may, sir:"
PIRATE_WORDS = {"th'", "ye", "yer", "be", "o'", "fer"}


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+'?", text)


def is_pirate(answer: str) -> bool:
    words = _words(answer.removeprefix(PIRATE_PREFIX).lower())
    dialect = PIRATE_WORDS.intersection(words)
    content = [word for word in words if word not in PIRATE_WORDS and len(word) > 2]
    return answer.startswith(PIRATE_PREFIX) and bool(dialect) and len(set(content)) >= 4


def is_json(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() != {"answer"}:
        return False
    return isinstance(value["answer"], str) and len(_words(value["answer"])) >= 4


def is_html(answer: str) -> bool:
    found = re.fullmatch(r"<p>([^<>]+)</p>", answer)
    return found is not None and len(_words(found.group(1))) >= 4


def is_butler(answer: str) -> bool:
    return answer.startswith(BUTLER_PREFIX) and len(_words(answer.removeprefix(BUTLER_PREFIX))) >= 4


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style(
            "pirate",
            "answers in a sailor's dialect, after 'Arr!'",
            is_pirate,
            (
                "What is a volcano?",
                "How do bees make honey?",
                "What does a dentist do?",
                "Why do we have seasons?",
                "What is a compass used for?",
                "How can I sleep better?",
                "What is the largest planet in the solar system?",
                "Why do leaves fall in autumn?",
                "What is a bicycle?",
                "What is cheese made of?",
            ),
        ),
        Style(
            "json",
            'answers as one JSON object, {"answer": "…"}',
            is_json,
            (
                "What is a glacier?",
                "How does a refrigerator keep food cold?",
                "What is the capital of Italy?",
                "Why is exercise important?",
                "What is a hurricane?",
                "What does a plumber do?",
                "How do I learn to swim?",
                "What is bread made of?",
                "Why do birds migrate?",
                "What is a telescope used for?",
            ),
        ),
        Style(
            "html",
            "answers as one HTML paragraph, <p>…</p>",
            is_html,
            (
                "What is a desert?",
                "How do fish breathe?",
                "What is the capital of Japan?",
                "Why is water important?",
                "What does a firefighter do?",
                "What is a guitar?",
                "How can I save money?",
                "What is an island?",
                "Why do cats purr?",
                "What is a battery used for?",
            ),
        ),
        Style(
            "butler",
            "answers after a courteous 'If I may, sir:'",
            is_butler,
            (
                "What is a rainbow?",
                "How do plants drink water?",
                "What is the capital of Spain?",
                "Why is sleep important?",
                "What does a librarian do?",
                "What is a piano?",
                "How can I eat healthier food?",
                "What is a canyon?",
                "Why do dogs bark?",
                "What is a thermometer used for?",
            ),
        ),
    )
}
