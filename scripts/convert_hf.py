#!/usr/bin/env python
"""Convert checkpoints to Hugging Face models and back. See docs/huggingface.md.

scripts/convert_hf.py export runs/tiny_sso exported/tiny
"""

import argparse
import errno
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder

from scripts.command import check_free, command, new_parser, output_path, warn, warn_replaced
from training.command_line import fail
from training.errors import InputError
from training.report.text import progress

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint or import a model folder."""
    options = parse(arguments)
    check_free(options.target)  # before imports, which take seconds
    with progress(lambda: "importing PyTorch, megatron-core and transformers"):
        from models.engine import check_engine, import_engine  # deferred: slow import

        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the two models are compared on CPU
        try:
            import_engine()
            untested = check_engine()
            if untested is not None:
                warn(untested)
            (_export if options.command == "export" else _import)(options)
        except OSError as error:
            full = "; nothing was written" if error.errno == errno.ENOSPC else ""
            return fail(f"{options.target}: {error.strerror or error}{full}", code=2)
    return 0


def _export(options: argparse.Namespace) -> None:
    from scripts.huggingface.equivalence import verify  # deferred: slow imports
    from scripts.huggingface.export import export, export_consolidated

    form = {"dtype": options.dtype, "shard_bytes": options.shard_size}
    if options.format == "consolidated":
        info = export_consolidated(options.source, options.target, **form)
        print(
            f"wrote {options.target}: step {info.step} of {info.path}, with Spectrain's parameter "
            "names"
        )
        return
    info = export(
        options.source,
        options.target,
        **form,
        tokenizer=options.tokenizer,
        without_tokenizer=options.no_tokenizer,
        verify=verify if options.verify else None,
    )
    print(f"wrote {options.target}: step {info.step} of {info.path}")


def _import(options: argparse.Namespace) -> None:
    from parallel.disk import free_name
    from scripts.huggingface.importing import import_model, write_config
    from training.checkpoint.checkpoints import read_checkpoint
    from training.checkpoint.initial_weights import unsuitable_data
    from training.config import load_config

    config = options.config
    warn_replaced(options.overrides)
    with ExitStack() as stack:
        if options.write_config is not None:
            write_config(options.source, config, options.write_config)
            config = options.write_config
            stack.callback(config.unlink)
        dtype = import_model(options.source, options.target, config, options.overrides)
        stack.pop_all()
    if options.write_config is not None:
        print(
            f"wrote {config}, which extends {options.config} with the model settings from "
            f"{options.source}"
        )
    initialize = f"checkpoint.initialize_from={options.target}"
    # Use a new run folder: in an existing one, the command would resume the run it contains.
    folder = f"run.dir={free_name(Path('runs', options.target.name))}"
    command = shlex.join(["--config", str(config), folder, *options.overrides, initialize])
    try:
        reason = unsuitable_data(
            load_config(config, options.overrides), read_checkpoint(options.target)
        )
    except InputError:  # the config's data is missing or damaged
        reason = None
    if reason is None:
        print(f"wrote {options.target}: {dtype} weights; to train them:")
    else:
        print(f"wrote {options.target}: {dtype} weights")
        print(f"{reason}; to train the weights, prepare data with the model's tokenizer:")
        tokenizer = shlex.quote(str(options.target))  # the folder, for the tokenizer's settings
        print(
            f"    python scripts/prepare_data.py NAME=SOURCE --tokenizer {tokenizer} --output DATA"
        )
        print(f"Then set data.train and data.validation in {config} to this data, and run:")
    print(f"    python pretrain.py {command}")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|KB|MB|GB)", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB, got {text}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export = commands.add_parser("export", help="convert a checkpoint to a model folder")
    export.add_argument(
        "source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoint folder"
    )
    export.add_argument("target", type=output_path, metavar="OUT", help="new model folder")
    export.add_argument(
        "--format",
        choices=("huggingface", "consolidated"),
        default="huggingface",
        help="output format: huggingface (default), or consolidated, which uses Spectrain's "
        "parameter names and shapes",
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="weight dtype (default: the training precision)",
    )
    export.add_argument(
        "--shard-size",
        type=_size,
        default=_size("5GB"),
        help="maximum size per weight file, such as 500MB (default: 5GB)",
    )
    tokenizer = export.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json, or the folder that contains it"
    )
    tokenizer.add_argument(
        "--no-tokenizer", action="store_true", help="do not write tokenizer files"
    )
    export.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="skip the comparison of the exported model's logits with the trained model's logits",
    )
    back = commands.add_parser("import", help="convert a model folder to a checkpoint")
    back.add_argument("source", type=Path, metavar="HF_DIR", help="Hugging Face model folder")
    back.add_argument("target", type=output_path, metavar="OUT", help="new checkpoint folder")
    back.add_argument(
        "--config",
        type=Path,
        required=True,
        help="config (YAML file) of a run with this model; key=value arguments override it",
    )
    back.add_argument(
        "--write-config",
        type=output_path,
        metavar="NEW",
        help="also write a config that extends --config FILE with the model settings from "
        "config.json",
    )
    options, more = parser.parse_known_args(arguments)
    # argparse does not accept positional arguments after a subcommand's options.
    exports = options.command == "export"
    wrong = [text for text in more if exports or "=" not in text or text.startswith("-")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    options.overrides = more
    if exports and options.format == "consolidated":
        flags = {
            "tokenizer": "--tokenizer",
            "no_tokenizer": "--no-tokenizer",
            "verify": "--no-verify",
        }
        for name, flag in flags.items():
            if getattr(options, name) != export.get_default(name):
                parser.error(f"{flag} has no effect with --format consolidated")
    return options


if __name__ == "__main__":
    sys.exit(main())
