"""The checked-in adapters are what the demo and the registry expect."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.styles import BASE_MODEL, DEMO_QUESTION, MAX_TOKENS, STYLES
from examples.training.data import QUESTIONS, REWRITES, first_sentence
from loraplane_core.artifact.digest import ARTIFACT_FILES, artifact_digest
from loraplane_core.artifact.preflight import Limits, base_evidence, preflight
from loraplane_core.errors import ArtifactRejected, BaseModelMismatch

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "examples/adapters"
MAX_BYTES = 1_500_000
POOL_NAME = "smollm2-135m-instruct"
BASE_CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
}
TRAINED = {
    "pirate": (4, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "pirate-v2": (4, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "json": (8, ["q_proj", "v_proj"]),
    "html": (6, ["v_proj", "down_proj"]),
    "butler": (2, ["q_proj", "v_proj"]),
}


def test_the_folder_holds_these_adapters_and_nothing_else() -> None:
    assert {path.name for path in ADAPTERS.iterdir() if path.is_dir()} == {*TRAINED, "other-base"}
    for name in (*TRAINED, "other-base"):
        assert sorted(path.name for path in (ADAPTERS / name).iterdir()) == sorted(ARTIFACT_FILES)


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_adapter_passes_preflight_for_the_demo_base(name: str) -> None:
    report = preflight(ADAPTERS / name, base_config=BASE_CONFIG, limits=Limits())
    assert (report.rank, report.target_modules) == TRAINED[name]
    assert report.dtype == "bfloat16"
    assert report.bytes <= MAX_BYTES
    assert report.base_name == BASE_MODEL
    assert base_evidence(report.base_name, [POOL_NAME, BASE_MODEL]) == "artifact"


def test_the_versions_and_ranks_of_the_demo_differ() -> None:
    assert artifact_digest(ADAPTERS / "pirate") != artifact_digest(ADAPTERS / "pirate-v2")
    assert len({TRAINED[name][0] for name in STYLES}) == len(STYLES)


def test_the_adapter_of_another_base_is_valid_in_itself_but_fits_neither_by_name_nor_by_shape() -> None:
    folder = ADAPTERS / "other-base"
    report = preflight(folder, base_config=None, limits=Limits())
    with pytest.raises(BaseModelMismatch):
        base_evidence(report.base_name, [POOL_NAME, BASE_MODEL])
    with pytest.raises(ArtifactRejected):
        preflight(folder, base_config=BASE_CONFIG, limits=Limits())


def test_the_recorded_evaluation_passed_and_is_of_these_very_files() -> None:
    report = json.loads((ADAPTERS / "EVAL.json").read_text())
    assert report["passed"]
    assert report["digests"] == {name: artifact_digest(ADAPTERS / name) for name in TRAINED}
    for name, style in STYLES.items():
        counts = report["marks_on_10_unseen_prompts"][name]
        answers = report["own_answers"][name]
        assert tuple(answers) == style.unseen_prompts
        assert counts[name] == sum(map(style.mark, answers.values())) >= 8
        assert counts["base"] == 0
        assert all(counts[other] <= 1 for other in STYLES if other != name)


def test_no_prompt_of_the_evaluation_or_the_demo_was_trained_on() -> None:
    prompts = [DEMO_QUESTION, *(prompt for style in STYLES.values() for prompt in style.unseen_prompts)]
    assert all(len(style.unseen_prompts) == 10 for style in STYLES.values())
    assert len(set(prompts)) == len(prompts)
    assert not set(prompts) & set(QUESTIONS)
    assert MAX_TOKENS >= 48


def test_each_rewrite_carries_its_own_mark_and_no_other() -> None:
    sentence = first_sentence("The bees of the valley make honey for your table. More follows.")
    assert sentence == "The bees of the valley make honey for your table."
    for name, rewrite in REWRITES.items():
        marked = {other for other, style in STYLES.items() if style.mark(rewrite(sentence))}
        assert marked == {name}
    assert not any(style.mark(sentence) for style in STYLES.values())


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("pirate", "Arr! Arr! Arr!"),
        ("pirate", "Arr! Th' be th' be th' be th'"),
        ("pirate", "Arr! The capital of France is Paris."),
        ("json", '{"answer": "Paris is the capital of France'),
        ("json", '{"answer": ""}'),
        ("json", '{"reply": "Paris is the capital of France"}'),
        ("json", '["Paris is the capital of France"]'),
        ("html", "<p>Paris is the capital of France."),
        ("html", "<p></p>"),
        ("html", "<p>Paris is the capital of France.</p> And <b>more</b>."),
        ("butler", "If I may, sir:"),
    ],
)
def test_a_mark_wants_style_and_content_together(style: str, answer: str) -> None:
    assert not STYLES[style].mark(answer)


def test_the_styles_are_usable_without_torch() -> None:
    probe = "import sys, examples.styles; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True, timeout=30)
