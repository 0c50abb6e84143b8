"""Which checkpoint a run continues, and how its state comes back."""

import secrets
from collections.abc import Collection
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from parallel.checkpoint.replicas import check_replicas
from parallel.checkpoint.state import StateError, load_state
from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import from_all
from training.checkpoint import files as checkpoint
from training.checkpoint.files import CheckpointInfo, ResumeError
from training.checkpoint.identity import Identity, differences, refusal
from training.checkpoint.saving import set_rng_state
from training.control.guard import NonFiniteError
from training.errors import BrokenCheckpointError
from training.loop import Trainer
from training.run_log import RunLog


def find_start(
    run_dir: str | Path, resume: str, now: Identity, allowed: Collection[str]
) -> CheckpointInfo | None:
    """The checkpoint to continue from, checked to the last byte; None to start from the beginning.

    All ranks together; rank 0 prints what it decides. `resume` is `latest`, `none` or a step, `now`
    what the run would be, `allowed` the kinds in which it may differ. Raises ResumeError if there
    are checkpoints and none can be continued: it is not for a program to start over.
    """
    if resume == "none":
        first_rank(lambda: start_over(run_dir))
        return None
    first_rank(lambda: announce_sweep(run_dir))
    candidates = first_rank(lambda: wanted_steps(run_dir, resume))
    broken: dict[int, str] = {}
    for step in candidates:
        try:
            info = first_rank(partial(_read, run_dir, step))
            _raise_differences(info, now, allowed)
            check_content(info)
        except BrokenCheckpointError as error:
            broken[step] = str(error)
            continue
        first_rank(partial(_settle, run_dir, info, broken, resume))
        return info
    if broken:
        lines = [*broken.values(), "no checkpoint can be loaded; --resume none starts over"]
        raise ResumeError("\n".join(lines))
    return None


def wanted_steps(run_dir: str | Path, resume: str) -> list[int]:
    """The steps whose checkpoints may be continued, best first. Raises ResumeError for a step that
    is not there, or if there is none left but broken ones were put aside."""
    there = checkpoint.steps(run_dir)
    if resume != "latest":
        if int(resume) not in there:
            known = ", ".join(map(str, there)) or "none"
            raise ResumeError(f"{run_dir} has no checkpoint of step {resume}; there are: {known}")
        return [int(resume)]
    folder = Path(run_dir) / checkpoint.FOLDER
    if not there and folder.is_dir() and any(folder.glob("broken-*")):
        raise ResumeError(
            f"{folder} has only broken checkpoints; --resume none starts the run over"
        )
    return there[::-1]


def announce_sweep(run_dir: str | Path) -> None:
    """None; removes what an interrupted save left, and says so."""
    names = checkpoint.sweep(run_dir)
    if names:
        print(f"removed {len(names)} unfinished: {', '.join(names)}", flush=True)


def start_over(run_dir: str | Path) -> None:
    """None; puts aside all checkpoints of earlier starts."""
    folder = Path(run_dir) / checkpoint.FOLDER
    if folder.is_dir() and any(folder.iterdir()):
        aside = checkpoint.free_name(folder.with_name(f"{checkpoint.FOLDER}-aside"))
        folder.rename(aside)
        print(f"starting over; earlier checkpoints are in {aside}", flush=True)


def _read(run_dir: str | Path, step: int) -> CheckpointInfo:
    return checkpoint.read_checkpoint(checkpoint.step_folder(run_dir, step))


def _raise_differences(info: CheckpointInfo, now: Identity, allowed: Collection[str]) -> None:
    different = differences(info.meta["identity"], now, allowed)
    if different:
        raise ResumeError(refusal(str(info.path), different))


def check_content(info: CheckpointInfo) -> None:
    """None; raises BrokenCheckpointError, on every rank, unless every file is as it was written.
    Each rank reads a share of the files."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    everyone = from_all(list(checkpoint.problems(info, share)))
    found = [text for texts in everyone for text in texts]
    if found:
        raise BrokenCheckpointError("; ".join(found))


def _settle(run_dir: str | Path, info: CheckpointInfo, broken: dict[int, str], resume: str) -> None:
    """None; says what is continued, and puts aside what must not be continued later."""
    for step, problem in broken.items():
        aside = checkpoint.quarantine(checkpoint.step_folder(run_dir, step))
        print(f"broken checkpoint: {problem}; it is now {aside}", flush=True)
    latest = info.path.parent / checkpoint.LATEST
    if latest.exists() and latest.read_text().strip() != info.path.name:
        print(f"{latest} names {latest.read_text().strip()}; continuing {info.path.name}")
    if resume != "latest":
        later = checkpoint.set_aside_after(run_dir, info.step, checkpoint.steps(run_dir))
        if later is not None:
            print(f"checkpoints of later steps are in {later}", flush=True)
    if not latest.exists() or latest.read_text().strip() != info.path.name:
        checkpoint.name_latest(run_dir, info.path.name)
    print(f"continuing from {info.path}", flush=True)


def restore(trainer: Trainer, info: CheckpointInfo) -> None:
    """None; brings the state of a checkpoint back, on any layout, and checks that ranks with copies
    of a weight have the same.

    Raises ResumeError if the checkpoint does not fit the model, DisagreementError if copies differ.
    """
    try:
        generators = torch.load(info.path / checkpoint.RNG, weights_only=True)
        extra = load_state(info.state, trainer.model, trainer.optimizer)
    except UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ResumeError(f"{info.path / checkpoint.RNG} is not trusted: {reason}") from error
    except (StateError, CheckpointException, CheckpointingException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ResumeError(f"{info.path} cannot be loaded: {reason}") from error
    if extra["step"] != info.step:
        raise ResumeError(
            f"{info.path}: the state is that of step {extra['step']}, not {info.step}"
        )
    check_replicas(trainer.model)
    trainer.restore(info.meta["progress"], info.meta["trainer"])
    if len(generators) == dist.get_world_size():
        set_rng_state(generators[dist.get_rank()])


def run_id(info: CheckpointInfo | None) -> str:
    """The name trackers know the run by: that of the checkpoint, or a new one; on every rank."""
    return info.meta["run_id"] if info else first_rank(lambda: secrets.token_hex(4))


def rewind(trainer: Trainer, log: RunLog | None, error: NonFiniteError) -> bool:
    """Whether the run goes on from its last checkpoint before the steps that were skipped, without
    their samples; all ranks together. `log` is the reporting rank's.

    False if `spikes.rewinds` are used up or there is no such checkpoint.
    """
    run_dir, lifecycle = trainer.config.run.dir, trainer.lifecycle
    left_out = (*trainer.progress.left_out, error.samples)
    if lifecycle is None or len(left_out) > trainer.config.spikes.rewinds:
        return False
    lifecycle.wait()
    before = first_rank(lambda: [s for s in checkpoint.steps(run_dir) if s < error.first_step])
    if not before:
        return False
    info = first_rank(lambda: _read(run_dir, before[-1]))
    check_content(info)
    skipped = trainer.guard.skipped
    restore(trainer, info)
    trainer.guard.skipped = skipped
    trainer.leave_out(left_out)
    lifecycle.saver.last_saved = info.step
    if log is not None:
        checkpoint.set_aside_after(run_dir, info.step, checkpoint.steps(run_dir))
        checkpoint.name_latest(run_dir, info.path.name)
        log.go_back(info.step, f"going back to {info.path}: {error}")
    return True
