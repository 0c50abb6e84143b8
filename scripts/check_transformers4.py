#!/usr/bin/env python
"""Compare what transformers 4 and 5 compute with exported models. See docs/huggingface.md.

    python scripts/check_transformers4.py exported/tiny --write logits
    .venv-transformers4/bin/python scripts/check_transformers4.py exported/tiny --compare logits

The first command, in the ordinary environment, writes every model's logits; the second, in an
environment with transformers 4, computes them again. It needs torch and transformers alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # run from any folder, installed or not

from scripts.command import command
from training.errors import print_error

os.environ["HF_HUB_OFFLINE"] = "1"

TOLERANCE = 1e-4
"""Largest difference of float32 logits, relative to the largest logit if that is above 1."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare logits; 0 if they agree, 1 if a model differs or does not load cleanly."""
    options = parse(arguments)
    import torch
    import transformers

    print(f"transformers {transformers.__version__}")
    folder = options.write or options.compare
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for number, model in enumerate(options.models):
        logits, problem = computed(model)
        file = folder / f"{number}.pt"
        if options.write:
            torch.save(logits, file)
        else:
            before = torch.load(file)
            difference = (logits - before).abs().max().item()
            print(f"{model}: largest difference of float32 logits {difference:.2e}")
            if not difference <= TOLERANCE * max(1.0, before.abs().max().item()):
                problem = problem or "the logits differ"
        if problem:
            print_error(f"{model}: {problem}")
            failed = True
    return int(failed)


def computed(folder: Path) -> tuple[Any, str]:
    """Logits `[1, n, vocabulary]` of a model, and a problem with loading it, or ''."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = json.loads((folder / "config.json").read_text())
    tokens = torch.arange(min(64, settings["max_position_embeddings"])) * 7919
    tokens = (tokens % settings["vocab_size"])[None]
    problem = ""
    if (folder / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "In the beginning was the word."
        if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
            problem = "the tokenizer does not give text back"
    # By default transformers 4 computes Gemma 2 without the cap on attention scores.
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    found = {key: value for key, value in info.items() if value}
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return logits, f"it does not load cleanly: {found}" if found else problem


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare transformers 4 and 5.")
    parser.add_argument("models", nargs="+", type=Path, metavar="OUT", help="exported models")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="DIR", help="write the logits to DIR")
    what.add_argument("--compare", type=Path, metavar="DIR", help="compare with those in DIR")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
