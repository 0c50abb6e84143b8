"""Choose the checkpoint to resume from, and set the others aside."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import found_by_any
from parallel.disk import free_name
from training.checkpoint import checkpoints
from training.checkpoint.changes import differences, refusal
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.identity import Identity, saved_identity
from training.checkpoint.stored_checkpoint import CheckpointInfo, ResumeError
from training.errors import BrokenCheckpointError


@dataclass(frozen=True)
class Start:
    """The starting point of a run, chosen without modifying the run folder.

    info    checkpoint to resume from; None to start from step 0
    resume  `latest`, `none` or a step
    broken  reasons why broken checkpoints cannot be loaded, by step
    """

    info: CheckpointInfo | None
    resume: str
    broken: Mapping[int, str] = field(default_factory=dict)

    def settle(self, run_dir: str | Path) -> None:
        """Move broken and superseded checkpoints to other folders and print the new paths.

        For rank 0 only. Call this after all checks that can abort the run.
        """
        if self.resume == "none":
            folder = Path(run_dir) / checkpoints.FOLDER
            if folder.is_dir() and any(folder.iterdir()):
                moved = free_name(folder.with_name(f"{checkpoints.FOLDER}-aside"))
                folder.rename(moved)
                print(f"starting over; moved earlier checkpoints to {moved}", flush=True)
            return
        if names := checkpoints.sweep(run_dir):
            print(f"removed {len(names)} unfinished checkpoints: {', '.join(names)}", flush=True)
        if self.info is None:
            return
        for step, problem in self.broken.items():
            aside = checkpoints.quarantine(checkpoints.step_folder(run_dir, step))
            print(f"broken checkpoint: {problem}; moved to {aside}", flush=True)
        path, named = self.info.path, checkpoints.latest_name(run_dir)
        if named not in (None, path.name):
            latest = path.parent / checkpoints.LATEST
            print(f"{latest} contained {named!r:.80} instead of {path.name}", flush=True)
        if self.resume != "latest":
            later = checkpoints.set_aside_after(run_dir, self.info.step)
            if later is not None:
                print(f"moved checkpoints of later steps to {later}", flush=True)
        if named != path.name:
            checkpoints.name_latest(run_dir, path.name)
        print(f"continuing from {path}", flush=True)


def find_start(run_dir: str | Path, resume: str, now: Identity, allowed: Collection[str]) -> Start:
    """Decide whether a run starts from a fully verified checkpoint or from step 0.

    Collective, without side effects.

    resume   `latest`, `none` or a step
    now      identity of the resuming run
    allowed  kinds that may differ from the checkpoint's identity

    Raises ResumeError if there are checkpoints but the run cannot resume from any of them: only the
    user may decide to start over.
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
    """Return the steps of the checkpoints that a run may resume from, in order of preference.

    Raises ResumeError if the requested step has no checkpoint, or if only broken checkpoints are
    left.
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


def _raise_differences(info: CheckpointInfo, now: Identity, allowed: Collection[str]) -> None:
    saved = saved_identity(info)
    if saved["model"]["weights"] != now["model"]["weights"]:  # the weights cannot be loaded
        allowed = {*allowed} - {"model"}
    different = differences(saved, now, allowed)
    if different:
        raise ResumeError(refusal(str(info.path), different, "pc.level" in now["model"]))


def check_content(info: CheckpointInfo) -> None:
    """Raise BrokenCheckpointError on every rank if a file has changed since it was written, or if a
    tensor contains non-finite values.

    Collective: all ranks must call this function. Each rank reads its share of the files and
    tensors.
    """
    share = slice(dist.get_rank(), None, dist.get_world_size())
    for find in (checkpoints.problems, checkpoints.not_finite):
        sentences = found_by_any(find(info, share))
        if sentences:
            raise BrokenCheckpointError("; ".join(sentences))


def tracker_id(start: CheckpointInfo | None, run_dir: str, run: str) -> str:
    """Return the id that trackers use for a run with the id `run`.

    A copied run folder gets another id, so that both runs can be tracked. A folder counts as a copy
    if the checkpoint was saved in a different folder that still exists.
    """
    if start is None:
        return run

    def find() -> str:
        saved = Path(start.config.run.dir)
        copied = saved.is_dir() and not saved.samefile(run_dir)
        return secrets.token_hex(4) if copied else str(start.meta.get("tracker_id", run))

    return first_rank(find)
