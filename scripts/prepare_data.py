#!/usr/bin/env python
"""Convert text to token sets for pretrain.py. See docs/data.md.

    scripts/prepare_data.py --demo --output data/demo
    scripts/prepare_data.py --corpus fineweb --output data/fineweb
    scripts/prepare_data.py web=corpus/*.jsonl.zst books=books/ --tokenizer llama3/ \\
        --validation-fraction 0.001 --output data/mix
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # runs from any folder

from parallel.error_text import first_line, os_error_text
from scripts.command import command, counted, output_path, token_count, warn, whole_number
from scripts.data.corpora import read_corpora
from scripts.data.document_files import ReadOptions
from scripts.data.hub import HubInput, hub_tokenizer
from scripts.data.plan import Portion, Preparation, SetPlan
from scripts.data.sources import SUFFIXES, Shard, find_inputs, joined
from training.command_line import Parser, fail
from training.errors import DataError, InputError, ProgressError
from training.json_file import real_path

_DEMO_SETS = ("kjv", "jargon", "devils_dictionary")
_DEMO_VOCABULARY = 4096
_DEMO_FRACTION = Fraction(1, 20)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data."""
    options = parse(arguments)
    output = real_path(Path(options.output))
    target = output if options.shard is None else options.shard.folder(output)
    try:
        _prepare(options, output)
    except InputError as error:
        over = f"; to start over, delete {target}.preparing"
        resumable = not isinstance(error, ProgressError)
        return fail(f"{error}{_kept(target, '') if resumable else over}", code=2)
    except OSError as error:
        return fail(f"{os_error_text(error, options.output)}{_kept(target)}", code=2)
    except KeyboardInterrupt:
        print(f"interrupted{_kept(target).replace(';', ':')}", file=sys.stderr)
        return 130
    return 0


def _kept(output: Path, nothing: str = "; nothing was written") -> str:
    """Return the suffix for an error: how to resume, or `nothing` if there is nothing to resume."""
    state = output.with_name(f"{output.name}.preparing.state")
    if not (state / "progress.json").exists():
        return nothing
    return f"; progress is saved in {output.name}.preparing; run the same command again to resume"


def _prepare(options: argparse.Namespace, output: Path) -> None:
    from scripts.data.folder import (  # deferred: imports torch
        check_replaceable,
        clean_up,
        holds_preparation,
    )

    shard: Shard | None = options.shard
    preparation = chosen(options)
    warnings = preparation.check()  # before the slow steps
    identities = preparation.identities() if shard is None else []
    if shard is None:
        warnings += preparation.repeated(identities)
        fingerprint = preparation.fingerprint(identities)
        if holds_preparation(output, fingerprint, overwrite=options.overwrite):
            clean_up(output)
            remote = any(
                isinstance(each, HubInput) and each.remote for each in preparation.inputs()
            )
            note = (
                "; hub datasets are not checked for changes: delete the folder to read them again"
            )
            print(f"{options.output} already contains this data{note if remote else ''}")
            return
    check_replaceable(output, options.overwrite)
    for plan in preparation.sets:
        print(f"token set {plan.name} {plan.listing()}")
    for warning in warnings:
        warn(warning)
    _check_export(preparation.tokenizer)
    from scripts.data.preparation import prepare, prepare_shard

    how = {"workers": options.workers, "overwrite": options.overwrite}
    if shard is not None:
        parts = prepare_shard(preparation, output, shard, **how).parts.values()
        documents, tokens = (sum(part[i] for part in parts) for i in (0, 1))
        print(
            f"wrote {shard.folder(output)}: {counted(documents, 'document')}, "
            f"{counted(tokens, 'token')}; once all shards are done, run the same command without "
            f"--shard to join {counted(shard.count, 'shard')}"
        )
        return
    manifest = prepare(preparation, output, identities=identities, **how)
    for name, entry in manifest.sets.items():
        print(
            f"{name}: {counted(entry.documents, 'document')}, {counted(entry.tokens, 'token')}, "
            f"{counted(entry.bytes, 'byte')} of text"
        )
    made = manifest.tokenizer
    end = f"end-of-document token {made.eod_token} (id {made.eod_id})"
    print(f"wrote {options.output}: vocabulary {made.vocab_size:,}, {end}")
    if not options.demo and options.corpus is None:
        print(how_to_train(options.output, list(manifest.sets)))


def _check_export(tokenizer: Path | None) -> None:
    """Raise DataError if the tokenizer would encode text differently in an exported model.

    transformers builds some tokenizers from tokenizer_config.json, which may contradict
    tokenizer.json, for example in `add_prefix_space`.
    """
    if tokenizer is None or not (tokenizer / "tokenizer_config.json").is_file():
        return
    from scripts.huggingface.loaded_tokenizer import checked_tokenizer  # deferred: slow import

    try:
        checked_tokenizer(tokenizer, with_template=True)
    except InputError as error:
        raise DataError(
            f"{error}; models with this tokenizer cannot be exported: fix tokenizer_config.json, "
            "or pass tokenizer.json alone"
        ) from None
    except Exception as error:  # transformers raises many exception types
        warn(f"transformers cannot load {tokenizer}: {first_line(error)}")


def how_to_train(folder: str, sets: Sequence[str]) -> str:
    """Return instructions: a config for the prepared sets, and the command to train on them."""
    name = Path(folder).name
    lines = ["base: configs/tiny_sso.yaml", f"run: {{name: {name}}}", "data:", "  replace: true"]
    for kind in ("train", "validation"):
        prefixes = [prefix for prefix in sets if prefix.endswith(f".{kind}")]
        lines += [f"  {kind}:"] if prefixes else []
        lines += [
            f"    {prefix.removesuffix(f'.{kind}')}: {{path: {folder}/{prefix}}}"
            for prefix in prefixes
        ]
    config = "\n".join(lines)
    return (
        f"\nto train on this data, save these lines as {name}.yaml next to pretrain.py:\n\n{config}"
        f"\n\nand run: python pretrain.py --config {name}.yaml --ranks 2"
    )


def chosen(options: argparse.Namespace) -> Preparation:
    """Return the preparation described by the options."""
    if options.demo:
        kept = {"demo", "output", "overwrite", "workers", "shard"}
        _refuse(options, "with --demo", *(name for name in vars(options) if name not in kept))
        demo = []
        for name in _DEMO_SETS:
            file = f"examples/data/{name}.txt.xz"
            portion = Portion(**vars(find_inputs(str(_ROOT / file))), source=[file])
            demo.append(SetPlan(name, [portion], _DEMO_FRACTION))
        return Preparation(sets=demo, vocabulary=_DEMO_VOCABULARY)
    sets, tokenizer = (_custom if options.corpus is None else _corpus)(options)
    inputs = [each for plan in sets for each in plan.inputs()]
    if all(each.text_key is not None or not each.has_keys for each in inputs):
        _refuse(options, "if every JSON lines, Parquet or hub input has a KEY", "text_key")
    if all(each.has_keys for each in inputs):
        _refuse(options, "without .txt or .md files", "document_bytes")
    return Preparation(
        sets=sets,
        vocabulary=options.train_tokenizer,
        tokenizer=tokenizer,
        eod=options.eod,
        reading=ReadOptions(text_key=options.text_key, document_bytes=options.document_bytes),
        allow_lossy=options.allow_lossy,
    )


def _refuse(options: argparse.Namespace, when: str, *names: str) -> None:
    """Raise InputError ("has no effect `when`") if any option in `names` was given."""
    defaults = vars(parse(["--output", ""]))
    flags = {"inputs": "NAME=INPUT", "local": "--from"}
    for name in names:
        if (value := getattr(options, name)) != defaults[name]:
            flag = flags.get(name, f"--{name.replace('_', '-')}")
            raise InputError(f"{flag} has no effect {when}, got {value}")


def _corpus(options: argparse.Namespace) -> tuple[list[SetPlan], Path]:
    """Return the plan for a corpus in scripts/data/corpora.yaml, and the path of the tokenizer.
    `--tokenizer` replaces the corpus's own tokenizer."""
    corpora = read_corpora()
    if options.corpus not in corpora:
        names = ", ".join(corpora)
        raise InputError(f"--corpus must be one of {names}, got {options.corpus}")
    if options.inputs or options.validation or options.train_tokenizer:
        text = "--corpus cannot be combined with inputs, --validation or --train-tokenizer; "
        raise InputError(f"{text}to override the corpus's tokenizer, pass --tokenizer PATH")
    _refuse(options, "with --corpus", "validation_fraction")
    corpus = corpora[options.corpus]
    tokenizer = options.tokenizer or hub_tokenizer(corpus.tokenizer)
    return [corpus.set_plan(options.tokens, options.local)], tokenizer


def _custom(options: argparse.Namespace) -> tuple[list[SetPlan], Path | None]:
    """Return the set plans, and the path given as --tokenizer (None: train a tokenizer)."""
    if not options.inputs:
        raise InputError("no input: pass NAME=INPUT, --corpus NAME or --demo")
    if options.local is not None:
        raise InputError("--from is only valid with --corpus; NAME=INPUT already names the source")
    if (options.train_tokenizer is None) == (options.tokenizer is None):
        raise InputError("pass exactly one of --train-tokenizer VOCABULARY and --tokenizer PATH")
    if options.eod is not None and options.tokenizer is None:
        raise InputError(
            "--eod is only valid with --tokenizer; a newly trained tokenizer defines its own "
            "end-of-document token"
        )
    train, validation = _named(options.inputs), _named(options.validation)
    for name in validation.keys() - train.keys():
        raise InputError(f"--validation {name}=INPUT requires a training set {name}=INPUT")
    plans = []
    for name, sources in train.items():
        portions, fraction = [_portion(sources, tokens=options.tokens)], options.validation_fraction
        if name in validation:
            portions, fraction = [*portions, _portion(validation[name], held_out=True)], Fraction(0)
        plans.append(SetPlan(name, portions, fraction))
    if validation.keys() == train.keys():
        _refuse(options, "if every set has --validation", "validation_fraction")
    return plans, options.tokenizer


_Source = tuple[str, str | None]
"""A document source, and the field that contains the text (None means --text-key)."""


def _portion(sources: list[_Source], **limits: Any) -> Portion:
    """Return a portion that reads `sources` in order. `limits` sets the portion's other fields."""
    listing = joined([find_inputs(text, key) for text, key in sources])
    names = [text if key is None else f"{text} (key {key})" for text, key in sources]
    return Portion(**vars(listing), source=names, **limits)


def _named(arguments: list[str]) -> dict[str, list[_Source]]:
    """Parse NAME[:KEY]=INPUT arguments. Return each name's sources in the order given."""
    named: dict[str, list[_Source]] = {}
    for argument in arguments:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)(?::([^=]+))?=(.+)", argument, re.DOTALL)
        if match is None:
            raise InputError(
                "an input must be NAME=INPUT or NAME:KEY=INPUT, with ASCII letters, digits, _ and "
                f"- in NAME, got {argument}"
            )
        name, key, source = match.groups()
        named.setdefault(name, []).append((source, key))
    return named


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from None
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def _output(text: str) -> str:
    return str(output_path(os.path.expanduser(text)))


def _shard(text: str) -> Shard:
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, got {text}")
    return Shard(int(match[1]) - 1, int(match[2]))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        description="Convert text to token sets (Megatron .bin and .idx files) with a tokenizer "
        "and a manifest. The output folder appears only when it is complete."
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="NAME[:KEY]=INPUT",
        help="NAME is the name of the set. INPUT is a file, a folder, a quoted glob or "
        "hf:DATASET[:CONFIG][:SPLIT]. KEY is the field that contains the text (default: "
        "--text-key). Inputs with the same name form one set. Supported file suffixes: "
        f"{SUFFIXES}",
    )
    parser.add_argument("--output", type=_output, required=True, help="output folder")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace existing data that is damaged or was made from different inputs or options",
    )
    parser.add_argument(
        "--demo", action="store_true", help="prepare the bundled corpus in examples/data"
    )
    parser.add_argument(
        "--corpus",
        help="prepare a recipe's corpus, streamed from the Hugging Face hub: "
        f"{', '.join(read_corpora())}",
    )
    parser.add_argument(
        "--from",
        dest="local",
        type=Path,
        help="with --corpus, read this file or folder instead of the hub",
    )
    parser.add_argument(
        "--tokens",
        type=token_count,
        help="number of tokens per set, such as 10000000000, 10_000_000_000, 1e10 or 10B; the set "
        "ends with the document that reaches this number (default: the corpus's own limit or, "
        "without --corpus, no limit)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--train-tokenizer",
        type=whole_number(),
        help="train a byte-level BPE with this vocabulary size on the training documents",
    )
    tokenizer.add_argument(
        "--tokenizer", type=Path, help="use this tokenizer.json or Hugging Face folder"
    )
    tokenizer.add_argument(
        "--eod",
        help="end-of-document token (default: the EOS token of --tokenizer or, if it has none, its "
        "only special token)",
    )
    tokenizer.add_argument(
        "--allow-lossy",
        action="store_true",
        help="accept a tokenizer that changes the text of more than 1%% of the documents",
    )
    documents = parser.add_argument_group("documents")
    documents.add_argument(
        "--validation-fraction",
        type=_fraction,
        default=Fraction(0),
        help="fraction of each set's documents to hold out for validation (default: %(default)s)",
    )
    documents.add_argument(
        "--validation",
        action="append",
        default=[],
        metavar="NAME[:KEY]=INPUT",
        help="validation documents for a set, instead of --validation-fraction",
    )
    documents.add_argument(
        "--text-key",
        default="text",
        help="field that contains the text, for inputs without KEY (default: %(default)s)",
    )
    documents.add_argument(
        "--document-bytes",
        type=whole_number(0),
        default=2048,
        help="split .txt and .md files into documents at the first blank line after this many "
        "bytes; 0 means one document per file (default: %(default)s)",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="K/N",
        help="encode only shard K of N, on any node with access to OUTPUT; once all N shards are "
        "done, run the same command without --shard to join them",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(),
        default=len(os.sched_getaffinity(0)),
        help="number of encoding threads; does not affect the result (default: %(default)s)",
    )
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
