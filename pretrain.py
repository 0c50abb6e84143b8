"""Pretrain a language model from a config.

    python pretrain.py --config configs/tiny_sso.yaml --ranks 2 [key=value ...]
    torchrun --nproc-per-node 2 pretrain.py --config configs/tiny_sso.yaml [key=value ...]

Exit codes: 0 if the run finished, or stopped after saving a checkpoint; 130 if Ctrl-C stopped it; 1
if it failed; 2 for invalid input. A plan exits with 0 even if the model does not fit on the GPUs.
"""

import signal

if __name__ == "__main__":  # until the run handles Ctrl-C, it exits without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

# Import torch lazily: Ctrl-C must be handled first, and --help should work without torch.
from parallel.error_text import os_error_text
from training.command_line import Parser, check_launched, check_single, fail, own_rank
from training.errors import ConfigError, InputError, MissingSetError, VocabularyError
from training.lifecycle.terminal import Interrupts, outlive_readers
from training.report.text import progress

if TYPE_CHECKING:
    from training.config import Config


MODES = {
    "print_config": "print the resolved config instead of training",
    "dry_run": "print the plan, with memory and step time, instead of training",
    "fit": "search for the fastest layout on --gpus N instead of training",
    "rehearse": "run a few steps of the real code on simulated GPUs instead of training",
}
"""Options that select a mode other than training, with their help texts."""
NEEDS: dict[str, tuple[str | None, ...]] = {
    "gpus": ("dry_run", "fit", "rehearse"),
    "device": ("dry_run", "fit", "rehearse"),
    "json": ("dry_run", "rehearse"),
    "write": ("fit",),
    "rank": ("rehearse",),
    "compile_kernels": ("rehearse",),
    "resume": (None,),
    "ranks": (None,),
}
"""Modes in which each option is valid; None stands for training."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line: config file, overrides and mode."""
    parser = Parser(
        description="Pretrain a language model with spectral optimizers.",
        epilog="Overrides are dotted keys, e.g. train.steps=100 optimizer.matrix.lr=0.01",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML config of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides")
    instead = parser.add_mutually_exclusive_group()
    for name, text in MODES.items():
        instead.add_argument(flag(name), action="store_true", help=text)
    parser.add_argument(
        "--write",
        type=output_file,
        metavar="FILE",
        help="with --fit: write the best layout as a config to FILE",
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help="number of GPUs to simulate, or to plan for (default for plans: plan.gpus)",
    )
    parser.add_argument(
        "--device",
        metavar="h100|h200|a100|b200|FILE",
        help="GPU type to plan for or to simulate (default: the config's plan.device)",
    )
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="with --dry-run or --rehearse: also write the plan or report to FILE",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="launch N ranks on this machine, like torchrun --nproc-per-node N",
    )
    parser.add_argument(
        "--resume",
        type=resume_from,
        metavar="none|latest|STEP",
        help="checkpoint in run.dir to resume from: latest (default), none, or a step",
    )
    parser.add_argument(
        "--rank",
        type=rank_or_all,
        metavar="R|all",
        help="with --rehearse: rank to rehearse (default: the first of each pipeline stage)",
    )
    parser.add_argument(
        "--compile-kernels",
        action="store_true",
        help="with --rehearse: also compile the Triton kernels that would be launched",
    )
    options = parser.parse_intermixed_args(arguments)
    chosen = next((mode for mode in MODES if getattr(options, mode)), None)
    for name, modes in NEEDS.items():
        given = getattr(options, name)
        if given is not None and given is not False and chosen not in modes:
            *others, last = map(flag, modes)
            needed = f"{', '.join(others)} or {last}" if others else last
            parser.error(f"{flag(name)} requires {needed}")
    if options.ranks is not None and "LOCAL_RANK" in os.environ:
        parser.error("--ranks cannot be used under torchrun, which launches the ranks itself")
    if options.rehearse and options.gpus is None:
        parser.error("--rehearse requires --gpus N")
    return options


def flag(name: str | None) -> str:
    """Return the command-line flag of an option, or a phrase for training if `name` is None."""
    return "a training run" if name is None else f"--{name.replace('_', '-')}"


def positive(text: str) -> int:
    """Parse `text` as a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def output_file(text: str) -> str:
    """Check that `text` is a file path in an existing folder, and return it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file path in an existing folder, got {text!r}")
    return text


def rank_or_all(text: str) -> int:
    """Parse `text` as a rank; "all" becomes -1."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be all or a rank, got {text!r}")
    return -1 if text == "all" else int(text)


def resume_from(text: str) -> str:
    """Check that `text` is none, latest or a step, and return it."""
    if text not in ("none", "latest") and not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be none, latest or a step, got {text!r:.40}")
    return text


def main(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Run the command and return the exit code.

    `interrupts` handles Ctrl-C; if None, Ctrl-C raises KeyboardInterrupt.
    """
    options = parse(arguments)
    if find_spec("torch") is None:
        text = f"{sys.executable} has no torch: run `make setup`, then `source .venv/bin/activate`"
        return fail(text, code=2)
    if not any(getattr(options, mode) for mode in MODES):
        try:
            check_single()
        except ConfigError as error:
            return fail(error, code=2)
    if options.ranks is not None:
        from training.launcher import launch

        given = iter(sys.argv[1:] if arguments is None else arguments)
        of_a_rank = []  # the command line of a single rank, without `--ranks N`
        for argument in given:
            if argument == "--ranks":
                next(given)
            elif not argument.startswith("--ranks="):
                of_a_rank.append(argument)
        return launch(options.ranks, [__file__, *of_a_rank])
    if options.dry_run or options.fit or options.rehearse:
        with progress(lambda: "importing PyTorch and megatron-core, planning the run"):
            return run(options, interrupts)
    return run(options, interrupts)


def run(options: argparse.Namespace, interrupts: Interrupts | None) -> int:
    """Run the selected mode on this rank and return the exit code."""
    from models.engine import EngineError, check_engine, import_engine
    from training.config import load_config, to_yaml
    from training.config.yaml_files import check_not_read
    from training.machine.device import prepare

    try:
        check_launched()
        config = load_config(options.config, options.overrides)
        for name in ("write", "json"):
            if (output := getattr(options, name)) is not None:
                check_not_read(Path(options.config), flag(name), Path(output))
        for text in hints(config, options) if own_rank() == 0 else ():
            print(f"warning: {text}", file=sys.stderr, flush=True)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        prepare(config)
        import_engine()
        untested = check_engine()
        if untested is not None and own_rank() == 0:
            print(f"warning: {untested}", file=sys.stderr)
        if options.dry_run or options.fit:
            from training.planning.plan_commands import dry_run, fit

            if own_rank() > 0:
                return 0
            if options.dry_run:
                dry_run(config, options.gpus, options.device, options.json)
            else:
                base, keys = options.config, options.overrides
                fit(config, options.gpus, options.device, base, keys, options.write)
            return 0
        if options.rehearse:
            from training.rehearsal.rehearse import run as rehearse

            return rehearse(config, options)
        check_place(config, options)
        return start_training(config, options.resume or "latest", interrupts)
    except MissingSetError as error:
        from training.data.build_data import without_sets

        lines = [str(error), *without_sets(config), *origin(error, config, options)]
        return fail("\n".join(lines), code=2)
    except VocabularyError as error:
        from training.config.yaml_files import place_of

        source = place_of(Path(options.config), options.overrides, ("model", "vocab_size"))
        return fail(f"{error}\nmodel.vocab_size is set by {source}", code=2)
    except (InputError, EngineError) as error:
        return fail(error, code=2)
    except OSError as error:
        return fail(os_error_text(error), code=1, same_on_all_ranks=False)


def check_place(config: "Config", options: argparse.Namespace) -> None:
    """Raise ConfigError if the config file is part of a run folder, but sets another run.dir. The
    folder was copied or moved, or run.dir is relative to another working directory. An override of
    run.dir is always accepted."""
    from training.config.yaml_files import merged_overrides

    file, given = Path(options.config).absolute(), merged_overrides(options.overrides)
    in_run = file.name == "config.yaml" and (file.parent / "checkpoints").is_dir()
    if not in_run or "dir" in (given.get("run") or {}):
        return
    folder = Path(config.run.dir)
    if folder.resolve() != file.parent.resolve():
        raise ConfigError(
            f"{options.config} is in the run folder {file.parent}, but sets run.dir to "
            f"{folder.absolute()}: if the folder was copied or moved, set run.dir={file.parent} to "
            "continue the run in it, or another run.dir"
        )


def hints(config: "Config", options: argparse.Namespace) -> Iterator[str]:
    """Yield warnings about replaced overrides, and about settings of unused rules in the config
    file or the overrides. In modes other than training, also yield warnings about other settings
    that have no effect."""
    from training.config.effects import settings_of_unused_rules, without_effect
    from training.config.yaml_files import own_keys, replaced

    yield from replaced(options.overrides)
    own = own_keys(Path(options.config), options.overrides)
    for key in sorted(own.intersection(settings_of_unused_rules(config))):
        yield f"{key} has no effect, because no role uses this rule"
    if options.dry_run or options.fit or options.rehearse:  # a training run logs these itself
        yield from without_effect(config)


def origin(error: MissingSetError, config: "Config", options: argparse.Namespace) -> Iterator[str]:
    """Yield hints on where a missing data set is expected and configured, and on how to remove
    it."""
    if error.key is None:
        return
    from training.config.yaml_files import place_of

    _, kind, name = error.key
    key = ".".join(error.key)
    path = getattr(config.data, kind)[name].path
    if not Path(path).is_absolute():
        yield (
            f"{path} is relative to the working directory, {Path.cwd()}: run the command from the "
            f"folder that contains this path, or set {key}.path to an absolute path"
        )
    source = place_of(Path(options.config), options.overrides, error.key)
    if source is not None:
        yield (
            f"{key} is set by {source}; {key}=null removes set {name}, and "
            f"data.{kind}=null removes all earlier sets in data.{kind}"
        )


def start_training(config: "Config", resume: str, interrupts: Interrupts | None = None) -> int:
    """Train on the launched ranks, or on a single rank without a launcher; return the exit code."""
    if own_rank() == 0:
        from training.report.console import opening, start_line

        print(start_line(config), flush=True)
    from models.engine import no_collection

    with no_collection():
        from parallel.comm import groups
        from parallel.comm.collectives import CollectiveError
        from training.config import check
        from training.data.build_data import with_vocabulary
        from training.lifecycle.lifecycle import FAILED, INTERRUPT, REASONS
        from training.lifecycle.terminal import CODE
        from training.machine.start import start_groups
        from training.run import SAME_ON_ALL_RANKS, train

    config = with_vocabulary(config)
    # The batch ramp is checked later, once the step to resume from is known.
    check(config, groups.world_size(), step=config.train.steps)
    if own_rank() == 0:
        for line in opening(config, groups.world_size()):
            print(line, flush=True)
    try:
        layout = start_groups(config, resume=resume)
    except CollectiveError as error:
        return fail(error, code=1, same_on_all_ranks=False)
    leave = groups.abort
    try:
        outcome = train(config, layout, resume=resume, interrupts=interrupts)
        leave = groups.shutdown
    except InputError:
        raise
    except SAME_ON_ALL_RANKS as error:
        return fail(error, code=1)
    except CollectiveError as error:
        if interrupts is not None and interrupts.requested:
            return fail(f"Ctrl-C killed a rank before all ranks could save: {error}", code=CODE)
        return fail(error, code=1, same_on_all_ranks=False)
    except OSError as error:
        text = f"{os_error_text(error)} (run.dir is {config.run.dir})"
        return fail(text, code=1, same_on_all_ranks=False)
    except Exception as error:
        if out_of_memory(error):
            text = f"out of memory: {' '.join(str(error).split())}"
            return fail(text, code=1, same_on_all_ranks=False)
        # Print the traceback first: leaving the process groups may block while other ranks wait.
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return 1
    finally:
        leave()
    return {REASONS[INTERRUPT]: CODE, REASONS[FAILED]: 1}.get(outcome.stopped or "", 0)


def out_of_memory(error: Exception) -> bool:
    """Return whether Python, numpy or torch failed to allocate host or GPU memory."""
    from torch import OutOfMemoryError

    kinds = MemoryError, OutOfMemoryError
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


if __name__ == "__main__":
    outlive_readers()
    interrupts = Interrupts()
    interrupts.listen()
    code = main(interrupts=interrupts)
    # Skip Python's final garbage collection, which would keep other ranks waiting for seconds.
    gc.freeze()
    sys.exit(code)
