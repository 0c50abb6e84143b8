"""The choice of the checkpoint that a run continues from."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import found_by_any
from parallel.disk import free_name
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.resume_rules import Identity, differences, refusal, saved_identity
from training.checkpoint.stored_checkpoint import CheckpointInfo, ResumeError
from training.errors import BrokenCheckpointError


@dataclass(frozen=True)
class Start:
    """The start of a run, decided without changing its folder.

    info    checkpoint to continue from, None to start from step 0
    resume  `latest`, `none` or a step
    broken  reason why each broken checkpoint cannot be loaded, by step
    """

    info: CheckpointInfo | None
    resume: str
    broken: Mapping[int, str] = field(default_factory=dict)

    def settle(self, run_dir: str | Path) -> None:
        """Move broken and superseded checkpoints to other folders, and print them (rank 0).

        Call this after all checks that may refuse the run.
        """
        if self.resume == "none":
            start_over(run_dir)
            return
        if names := checkpoints.sweep(run_dir):
            print(f"removed {len(names)} unfinished checkpoints: {', '.join(names)}", flush=True)
        if self.info is None:
            return
        for step, problem in self.broken.items():
            aside = checkpoints.quarantine(checkpoints.step_folder(run_dir, step))
            print(f"broken checkpoint: {problem}; moved to {aside}", flush=True)
        path = self.info.path
        latest = path.parent / checkpoints.LATEST
        named = (
            latest.read_text(encoding="utf-8", errors="replace").strip()
            if latest.is_file()
            else None
        )
        if named not in (None, path.name):
            print(f"{latest} contained {named!r:.80} instead of {path.name}", flush=True)
        if self.resume != "latest":
            later = checkpoints.set_aside_after(run_dir, self.info.step)
            if later is not None:
                print(f"moved checkpoints of later steps to {later}", flush=True)
        if named != path.name:
            checkpoints.name_latest(run_dir, path.name)
        print(f"continuing from {path}", flush=True)


def find_start(run_dir: str | Path, resume: str, now: Identity, allowed: Collection[str]) -> Start:
    """Return the start of a run: a fully verified checkpoint, or step 0.

    All ranks call this function; it changes nothing.

    resume   `latest`, `none` or a step
    now      identity of the continuing run
    allowed  kinds that may differ from the checkpoint's identity

    Raises ResumeError if there are checkpoints but the run cannot continue from any of them: only
    the user may start over.
    """
    if resume == "none":
        return Start(None, resume)
    candidates = first_rank(lambda: candidate_steps(run_dir, resume))
    broken: dict[int, str] = {}
    for step in candidates:
        try:
            info = first_rank(partial(read_checkpoint, checkpoints.step_folder(run_dir, step)))
            first_rank(partial(_raise_differences, info, now, allowed))
            check_content(info)
        except BrokenCheckpointError as error:
            broken[step] = str(error)
            continue
        return Start(info, resume, broken)
    if broken:
        lines = [*broken.values(), "no checkpoint can be loaded; to start over, use --resume none"]
        raise ResumeError("\n".join(lines))
    return Start(None, resume)


def candidate_steps(run_dir: str | Path, resume: str) -> list[int]:
    """Return the steps whose checkpoints may be continued, in order of preference.

    Raises ResumeError for a step without a checkpoint, or if only broken checkpoints are left.
    """
    there = checkpoints.steps(run_dir)
    if resume != "latest":
        if int(resume) not in there:
            steps = ", ".join(map(str, there)) or "none"
            raise ResumeError(f"{run_dir} has no checkpoint of step {resume}; available: {steps}")
        return [int(resume)]
    folder = Path(run_dir) / checkpoints.FOLDER
    if not there and folder.is_dir() and any(folder.glob("broken-*")):
        raise ResumeError(
            f"{folder} contains only broken checkpoints; to start over, use --resume none"
        )
    return there[::-1]


def start_over(run_dir: str | Path) -> None:
    """Move all checkpoints of the run folder to a new folder."""
    folder = Path(run_dir) / checkpoints.FOLDER
    if folder.is_dir() and any(folder.iterdir()):
        aside = free_name(folder.with_name(f"{checkpoints.FOLDER}-aside"))
        folder.rename(aside)
        print(f"starting over; moved earlier checkpoints to {aside}", flush=True)


def _raise_differences(info: CheckpointInfo, now: Identity, allowed: Collection[str]) -> None:
    different = differences(saved_identity(info), now, allowed)
    if different:
        raise ResumeError(refusal(str(info.path), different, "pc.level" in now["model"]))


def check_content(info: CheckpointInfo) -> None:
    """Raise BrokenCheckpointError on every rank if a file has changed since it was written or a
    tensor is not finite.

    All ranks call this function; each rank reads a share of the files and tensors.
    """
    share = slice(dist.get_rank(), None, dist.get_world_size())
    for find in (checkpoints.problems, checkpoints.not_finite):
        sentences = found_by_any(find(info, share))
        if sentences:
            raise BrokenCheckpointError("; ".join(sentences))


def run_id(meta: Mapping[str, Any]) -> str:
    """Return the run's id for trackers, the same on all ranks: the id in `meta`, or a new id if
    `meta` is empty."""
    return str(meta["run_id"]) if meta else first_rank(lambda: secrets.token_hex(4))
