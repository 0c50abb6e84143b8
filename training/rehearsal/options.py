"""Options of the command line that rehearsals have. Importing it imports nothing else."""

import argparse


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add `--rehearse` and what belongs to it."""
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="go through a few steps of the real code on pretended GPUs; train nothing",
    )
    parser.add_argument(
        "--rank",
        type=rank_or_all,
        metavar="R|all",
        help="with --rehearse: the rank (default: the first of each pipeline stage)",
    )
    parser.add_argument(
        "--device",
        default="h100",
        metavar="h100|h200|a100|b200|FILE",
        help="with --rehearse: the GPUs (default: h100)",
    )
    parser.add_argument(
        "--compile-kernels",
        action="store_true",
        help="with --rehearse: also compile Triton's kernels as they would be used",
    )


def problem(options: argparse.Namespace) -> str | None:
    """What does not go together, None if all does."""
    if options.rehearse and options.gpus is None:
        return "--rehearse needs --gpus N"
    if options.rehearse and options.gpus < 1:
        return f"--gpus must be at least 1, got {options.gpus}"
    if not options.rehearse and (options.rank is not None or options.compile_kernels):
        return "--rank and --compile-kernels need --rehearse"
    return None


def rank_or_all(text: str) -> int:
    """The rank that `text` names, -1 for all."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be all or a rank, got {text!r}")
    return -1 if text == "all" else int(text)
