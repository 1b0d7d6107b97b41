"""What the adapters are trained on: questions of our own, and how a plain answer is turned into each style."""

import json
import re

from examples.styles import BUTLER_PREFIX, PIRATE_PREFIX

_THINGS = """
an airplane|an algorithm|an antibiotic|an apple|an atom|a bank loan|a beach|a bridge|a butterfly|a calendar|a camera
a castle|a city|a cloud|a comet|a computer|a contract|a coral reef|a dam|a database|democracy|a dictionary|an earthquake
an eclipse|electricity|an elephant|energy|an engine|evaporation|evolution|a festival|a forest|friction|a galaxy|gravity
a harbour|the heart|an idiom|inflation|an insect|the internet|a kangaroo|a lake|a library|a lighthouse|a magnet|a map
a market|a microscope|a mountain|a museum|music|a novel|an ocean|an octopus|oxygen|a parliament|photosynthesis|a poem
a printer|a recipe|recycling|a river|a robot|a satellite|a school|soil|a spider|steel|a stock|the sun|a tax|tea
a theatre|a tornado|a train|a tree|a vaccine|a violin|a virus|a waterfall|wind power|a zoo
"""
_OTHERS = """
How do airplanes fly?|How do I boil an egg?|How do I choose a good book?|How do I make new friends?
How do I plant a tree?|How do I remove a stain?|How do I start a garden?|How do magnets work?|How do spiders catch prey?
How does a clock work?|How does a microwave oven work?|How does rain form?|How can I learn a new language?
How can I reduce stress?|How can I write a good letter?|How can I train a puppy?|How is glass made?|How is paper made?
Why do people dance?|Why do we dream?|Why do stars twinkle?|Why is honesty important?|Why is reading good for you?
Why is the ocean salty?|Why do owls hunt at night?|Why do we need vitamins?|Why does ice float?|Why do people travel?
What does a baker do?|What does a judge do?|What does a nurse do?|What does a pilot do?|What does a teacher do?
What is a hammer used for?|What is a ladder used for?|What is a microphone used for?|What is salt used for?
What is the capital of Canada?|What is the capital of Egypt?|What is the capital of Germany?|What is the fastest animal?
What is the longest river in the world?|What is the tallest mountain in the world?|What is chocolate made of?
What is glue made of?|What are clouds made of?|Who was Albert Einstein?|Who wrote Romeo and Juliet?
Tell me something about whales.|Tell me something about Mars.|Give me a tip for cooking rice.|Name a healthy breakfast.
"""


def _items(block: str) -> list[str]:
    return [item.strip() for line in block.strip().splitlines() for item in line.split("|")]


QUESTIONS: tuple[str, ...] = (*(f"What is {thing}?" for thing in _items(_THINGS)), *_items(_OTHERS))

_SENTENCE = re.compile(r"(.+?[.!?])(?=\s|$)")
_DIALECT = {
    "the": "th'",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "of": "o'",
    "for": "fer",
}
_DIALECT_WORD = re.compile(r"\b(" + "|".join(_DIALECT) + r")\b", re.IGNORECASE)


def first_sentence(answer: str) -> str | None:
    """The first sentence when it is a plain one of a useful length, else None: lists and run-ons teach no style."""
    found = _SENTENCE.match(answer.strip())
    if not found:
        return None
    sentence = found.group(1)
    plain = not re.search(r'[\n"*#:<>&\\]', sentence)
    return sentence if plain and 5 <= len(sentence.split()) <= 32 else None


def to_pirate(sentence: str) -> str:
    def dialect(found: re.Match[str]) -> str:
        word = _DIALECT[found.group(0).lower()]
        return word.capitalize() if found.group(0)[0].isupper() else word

    return f"{PIRATE_PREFIX} {_DIALECT_WORD.sub(dialect, sentence)}"


def to_json(sentence: str) -> str:
    return json.dumps({"answer": sentence}, ensure_ascii=False)


def to_html(sentence: str) -> str:
    return f"<p>{sentence}</p>"


def to_butler(sentence: str) -> str:
    return f"{BUTLER_PREFIX} {sentence}"


REWRITES = {"pirate": to_pirate, "json": to_json, "html": to_html, "butler": to_butler}
