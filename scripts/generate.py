#!/usr/bin/env python
"""Continue a prompt with an exported model.

scripts/generate.py exported/tiny "In the beginning" --tokens 40
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # run from any folder, installed or not

from scripts.command import command, number, require, whole_number  # noqa: E402
from training.errors import InputError  # noqa: E402


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation."""
    options = parse(arguments)
    for name in ("config.json", "tokenizer.json"):
        if not (options.model / name).is_file():
            raise InputError(f"{options.model} has no {name}")
    require("transformers", "hf")
    import torch  # these take seconds to import
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    place = {"pretrained_model_name_or_path": options.model, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place)
    prompt = tokenizer(options.prompt, return_tensors="pt", add_special_tokens=False)
    if prompt["input_ids"].shape[1] == 0:
        raise InputError("the prompt has no tokens")
    room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
    if options.tokens > room:
        raise InputError(
            f"--tokens must be at most {room}, the positions of the model after the prompt, "
            f"got {options.tokens}"
        )
    sampling = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling["temperature"] = options.temperature
    written = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=options.tokens,
        **sampling,
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Continue a prompt with an exported model.")
    parser.add_argument("model", type=Path, metavar="OUT", help="the exported model folder")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument(
        "--tokens",
        type=whole_number(),
        default=40,
        metavar="N",
        help="tokens to generate (default: 40)",
    )
    parser.add_argument(
        "--temperature",
        type=number(0, 1e6),
        default=0.0,
        metavar="T",
        help="sample from the scores divided by T; 0 takes the best token (default: 0)",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, help="seed of the sampling (default: 0)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
