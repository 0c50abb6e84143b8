#!/usr/bin/env python
"""Generate text from a prompt with a run, a checkpoint or an exported model.

scripts/generate.py runs/tiny_sso "In the beginning" --tokens 40
"""

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder

from scripts.command import command, new_parser, require, whole_number
from training.errors import InputError, printable
from training.report.text import progress

DEFAULT_TOKENS = 40


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation."""
    options = parse(arguments)
    if re.search("[\ud800-\udfff]", options.prompt):
        raise InputError(f"the prompt must be valid UTF-8, got {options.prompt!r:.40}")
    require("transformers")
    if not 0 <= options.temperature < float("inf"):
        raise InputError(f"--temperature must be finite and at least 0, got {options.temperature}")
    if options.seed is not None and not options.temperature:
        raise InputError("--seed requires --temperature above 0; at 0, decoding is greedy")
    with (
        progress(lambda: "importing packages, loading the model, generating tokens"),
        exported(options.source, options.tokenizer) as folder,
    ):
        text = continuation(folder, options)
    print(printable(text))
    return 0


@contextlib.contextmanager
def exported(source: Path, tokenizer: Path | None) -> Iterator[Path]:
    """Yield the folder of an exported model, exporting `source` first if necessary.

    A checkpoint, or the newest complete checkpoint of a run, is exported to a temporary folder.
    Raises InputError if `source` contains neither a checkpoint nor an exported model, or if the run
    has no tokenizer.
    """
    if (source / "config.json").is_file():
        if tokenizer is not None:
            raise InputError(
                "--tokenizer is only valid with a run or checkpoint, got the exported model "
                f"{source}"
            )
        if not (source / "tokenizer.json").is_file():
            raise InputError(f"{source} must contain tokenizer.json; export it with a tokenizer")
        yield source
        return
    from models.engine import import_engine  # deferred: slow import

    import_engine()
    from scripts.huggingface.export import export

    with tempfile.TemporaryDirectory(prefix="spectrain-model-") as folder:
        target = Path(folder) / "model"
        info = export(source, target, tokenizer=tokenizer)
        print(f"step {info.step} of {info.path}", file=sys.stderr)
        yield target


def continuation(folder: Path, options: argparse.Namespace) -> str:
    """Return the prompt followed by the text that the exported model in `folder` generates."""
    import torch  # deferred: slow imports
    from transformers import AutoTokenizer, GenerationConfig

    from scripts.huggingface.model_folder import load_whole, offline, read_settings

    end = read_settings(folder).get("eos_token_id")  # one id or several
    ends = end if isinstance(end, list) and end else [end]
    torch.manual_seed(options.seed or 0)
    try:
        with offline():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many exception types here
        raise InputError(f"{folder} cannot be loaded: {error!r:.200}") from error
    model = load_whole(folder)
    before, plain = prompt_tokens(tokenizer, options.prompt)
    prompt = torch.tensor([before + plain])
    positions, length = model.config.max_position_embeddings, prompt.shape[1]
    remaining = positions - length
    if remaining < 1:
        raise InputError(
            f"the prompt must be shorter than the model's context of {positions} tokens, got "
            f"{length} tokens"
        )
    tokens = options.tokens or min(DEFAULT_TOKENS, remaining)
    if tokens > remaining:
        raise InputError(
            f"--tokens must be at most {remaining}, the context remaining after the prompt, got "
            f"{tokens}"
        )
    # Ignore the folder's generation_config.json and transformers' default top_k of 50.
    sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    model.generation_config = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=end,
        pad_token_id=ends[0],
        **(sampling if options.temperature else {}),
    )
    written = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt))
    ids = written[0].tolist()[len(before) :]
    missing = set(ids) - set(tokenizer.get_vocab().values())
    if missing:
        raise InputError(f"the model generated token {min(missing)}, which is not in its tokenizer")
    ids = ids[:-1] if ids[-1] in ends else ids
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def prompt_tokens(tokenizer: Any, prompt: str) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before a text, and the tokens of the prompt.

    Print a note to stderr if the prompt contains special tokens or does not decode to the same
    text. Raises InputError if the prompt has no tokens.
    """
    encode = partial(tokenizer, prompt, verbose=False)
    plain: list[int] = encode(add_special_tokens=False)["input_ids"]
    if not plain:
        raise InputError(f"the prompt must have at least one token, got {prompt!r:.40}")
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special and number in plain:
            name = printable(token.content)
            print(f"{name} in the prompt is read as a special token, not as text", file=sys.stderr)
    decoded = tokenizer.decode(plain, clean_up_tokenization_spaces=False)
    if decoded != prompt:
        print(f"the tokenizer changes the prompt to {printable(decoded)!r}", file=sys.stderr)
    # Tokenizers of imported models may put tokens such as <s> before a text.
    whole: list[int] = encode()["input_ids"]
    return whole[: -len(plain)] if whole[-len(plain) :] == plain else [], plain


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="run folder (uses the newest complete checkpoint), checkpoint folder or exported "
        "model",
    )
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument(
        "--tokens",
        type=whole_number(),
        help=f"number of tokens to generate (default: {DEFAULT_TOKENS}, or as many as fit in the "
        "remaining context)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 means greedy decoding (default: 0)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json to use (default: the run's tokenizer)"
    )
    parser.add_argument("--seed", type=whole_number(0), help="sampling seed (default: 0)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
