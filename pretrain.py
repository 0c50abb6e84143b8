"""Pretrains a language model as a config says.

    torchrun --nproc-per-node 2 pretrain.py --config configs/tiny_sso.yaml [key=value ...]

Exit codes: 0 the run ended as configured, 1 it broke off, 2 the input was wrong.
"""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from training.config import Config, check, load_config, to_yaml
from training.errors import InputError, print_error
from training.rehearsal import options as rehearsal


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: a config file, dotted overrides, and what to do instead of training."""
    parser = argparse.ArgumentParser(
        description="Pretrain a language model with spectral optimizers.",
        epilog="Overrides are dotted keys, e.g. train.steps=100 optimizer.matrix.lr=0.01",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values over the file's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print model, routing of every unit, tokens, FLOPs and memory; train nothing",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="with --dry-run (default: this world) or --rehearse: for N ranks",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="with --dry-run or --rehearse: also write what is printed to FILE, as JSON",
    )
    parser.add_argument(
        "--resume",
        type=resume_from,
        default="latest",
        metavar="none|latest|STEP",
        help="what to continue in run.dir: its newest checkpoint (default), none, or that of STEP",
    )
    rehearsal.add_to(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.json is not None and not (options.dry_run or options.rehearse):
        parser.error("--json needs --dry-run or --rehearse")
    problem = rehearsal.problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def resume_from(text: str) -> str:
    """`text` if it is none, latest or a step."""
    if text not in ("none", "latest") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be none, latest or a step, got {text!r}")
    return text


def rank() -> int:
    """Global rank, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    # The engine warns at import about optional packages that we replace.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        if options.dry_run:
            return dry_run(config, options.gpus, options.json)
        if options.rehearse:
            from training.rehearsal.command import run as rehearse

            return rehearse(config, options)
        return train(config, options.resume)
    except InputError as error:
        return fail(error, code=2)


def dry_run(config: Config, ranks: int | None, json_file: str | None) -> int:
    """Print what the run would be on `ranks` ranks (default: the smallest world that fits)."""
    from parallel.comm.groups import world_size
    from training.build import with_vocabulary
    from training.dry_run import describe, plan_run

    ranks = ranks or max(world_size(), config.parallel.model_ranks)
    config = with_vocabulary(config)
    check(config, ranks)
    if rank() == 0:
        planned = plan_run(config, ranks)
        print(describe(config, planned))
        if json_file is not None:
            Path(json_file).write_text(json.dumps(planned.as_dict(), indent=2) + "\n")
    return 0


def train(config: Config, resume: str) -> int:
    """Exit code; trains on the ranks that torchrun started, or on one without it."""
    from parallel.checkpoint.state_writer import WriterError
    from parallel.comm import groups
    from parallel.comm.collectives import CollectiveError
    from parallel.optimizer.build import DisagreementError
    from training.build import with_vocabulary
    from training.checkpoint.saving import CheckpointError
    from training.control.guard import NonFiniteError
    from training.machine.start import start
    from training.run import train as run

    config = with_vocabulary(config)
    check(config, groups.world_size())
    layout = groups.initialize(
        tensor=config.parallel.tensor,
        pipeline=config.parallel.pipeline,
        virtual_pipeline=config.parallel.virtual_pipeline,
        context=config.parallel.context,
        expert=config.parallel.expert,
        expert_tensor=config.parallel.expert_tensor,
        timeout_seconds=config.parallel.timeout_seconds,
        device_type=start(config),
    )
    leave = groups.abort
    try:
        run(config, layout, resume=resume)
        leave = groups.shutdown
    except InputError:
        raise
    except (NonFiniteError, DisagreementError, CheckpointError, WriterError) as error:
        return fail(error, code=1)
    except CollectiveError as error:
        return fail(error, code=1, same_on_all_ranks=False)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        text = f"{error.strerror or error}{where} (run.dir is {config.run.dir})"
        return fail(text, code=1, same_on_all_ranks=False)
    except Exception:
        # Said before anything else, as peers that are left waiting may keep this rank from it.
        traceback.print_exc()
        return 1
    finally:
        leave()
    return 0


def fail(error: Exception | str, *, code: int, same_on_all_ranks: bool = True) -> int:
    """`code`; prints the error, a line per problem. If it is `same_on_all_ranks` on all ranks, rank
    0 speaks for them."""
    if rank() == 0 or not same_on_all_ranks:
        print_error(error)
    else:
        # torchrun stops all ranks when one ends: leave rank 0 the time to speak.
        time.sleep(2)
    return code


if __name__ == "__main__":
    sys.exit(main())
