"""Options of the command line that rehearsals have. Importing it imports nothing else."""

import argparse


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options that `--rehearse` has of its own."""
    parser.add_argument(
        "--rank",
        type=rank_or_all,
        metavar="R|all",
        help="with --rehearse: the rank (default: the first of each pipeline stage)",
    )
    parser.add_argument(
        "--compile-kernels",
        action="store_true",
        help="with --rehearse: also compile the Triton kernels that would be launched",
    )


def rank_or_all(text: str) -> int:
    """Return the rank that `text` names, -1 for all."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be all or a rank, got {text!r}")
    return -1 if text == "all" else int(text)
