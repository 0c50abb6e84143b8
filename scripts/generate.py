#!/usr/bin/env python
"""Continues a prompt with an exported model, for a person to look at.

scripts/generate.py exported/tiny "In the beginning" --tokens 40
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 the folder is no model."""
    options = _parser().parse_args(arguments)
    for name in ("config.json", "tokenizer.json"):
        if not (options.model / name).is_file():
            print(f"error: {options.model} has no {name}", file=sys.stderr)
            return 2
    import torch  # here, because they take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    place = {"pretrained_model_name_or_path": options.model, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place)
    prompt = tokenizer(options.prompt, return_tensors="pt", add_special_tokens=False)
    if prompt["input_ids"].shape[1] == 0:
        print("error: the prompt has no tokens", file=sys.stderr)
        return 2
    drawn = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        drawn["temperature"] = options.temperature
    written = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=options.tokens,
        **drawn,
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Continues a prompt with an exported model.")
    parser.add_argument("model", type=Path, metavar="OUT", help="the exported model folder")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument(
        "--tokens", type=int, default=40, metavar="N", help="how many (default: 40)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw from the scores divided by T; 0 takes the best token (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
