"""Train the example adapters with PEFT on the imported SmolLM2-135M-Instruct, on a CPU, in minutes.

    python examples/train_adapters.py                  # all of them, then the evaluation
    python examples/train_adapters.py --only pirate    # one adapter, no evaluation
    python examples/train_adapters.py --evaluate       # the evaluation alone, of what is under examples/adapters
    python examples/train_adapters.py --answers        # the base's answers anew (examples/training/base_answers.json)

Each adapter learns a way of speaking, not facts: it is trained on the base model's own first sentences, rewritten into
its style (self-distillation), so the content stays the base's. Loss on the answer only; bf16 base, fp32 LoRA weights.
Seeds are fixed and the algorithms deterministic, so a run repeats on the same machine and thread count; another CPU may
round differently, which is why the tests ask for the style and not for the text.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Run as a file, only examples/ is on the path. Appended, not inserted: the root also holds a folder named `operator`.
sys.path.append(str(ROOT))

import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

from examples.training.evaluation import evaluate  # noqa: E402
from examples.training.model import training_sentences, write_base_answers  # noqa: E402
from examples.training.other_base import write_other_base  # noqa: E402
from examples.training.recipe import RECIPES, train  # noqa: E402

OTHER_BASE = "other-base"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".loraplane/models/smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=ROOT / "examples/adapters")
    parser.add_argument("--only", choices=[*RECIPES, OTHER_BASE], help="train (or write) this one, skip the evaluation")
    parser.add_argument("--evaluate", action="store_true", help="evaluate only")
    parser.add_argument("--answers", action="store_true", help="only let the base answer the training questions anew")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        parser.error(f"{options.model} is not there; run `make model` (or `loraplane model import`) first")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    started = time.monotonic()
    if options.answers:
        write_base_answers(options.model)
        return 0
    if not options.evaluate:
        sentences = training_sentences()
        for recipe in RECIPES.values():
            if options.only in (None, recipe.name):
                train(recipe, sentences, options.model, options.out)
        if options.only in (None, OTHER_BASE):
            write_other_base(options.out / OTHER_BASE)
    passed = True
    if not options.only:
        passed = evaluate(options.model, options.out, "python examples/train_adapters.py --evaluate")
    print(f"done in {time.monotonic() - started:.0f} s", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
