"""Checkpoints on disk: what one consists of, how it is completed, found again and checked.

    RUN/checkpoints/latest               name of the newest step folder, for people and scripts
    RUN/checkpoints/step_00000100/ state/                           every tensor, in logical
    coordinates (parallel/checkpoint/state.py) config.yaml                      the resolved config
    of the run rng.pt                           every rank's random number generators meta.json
    step, data position, identity, versions, hash of every file COMPLETE                         the
    hash of meta.json; written last

A checkpoint is written as `.writing-...` beside these and renamed when everything in it is on the
disk, so a folder named step_* was complete once. Nothing of it lies outside the folder, and nothing
decides by `latest` what to load.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from parallel.checkpoint.state_writer import FileFacts, file_facts, sync
from training.checkpoint.stored_tensors import StoredTensors
from training.config import Config, InvalidConfigError, load_saved_config
from training.errors import BrokenCheckpointError, InputError

FORMAT: Final = 1
FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
META, COMPLETE, CONFIG, RNG, STATE = "meta.json", "COMPLETE", "config.yaml", "rng.pt", "state"
UNFINISHED: Final = re.compile(r"\.(writing|removing)-.*")
STEP: Final = re.compile(r"step_(\d{8,})")


class ResumeError(InputError):
    """A run that cannot be continued as asked."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint.

    path   its folder
    meta   what meta.json holds
    """

    path: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.meta["step"])

    @property
    def state(self) -> Path:
        """The folder that `parallel.checkpoint.state.load_state` reads."""
        return self.path / STATE

    @property
    def config(self) -> Config:
        """The config of the run that saved it, its vocabulary size filled in.

        Raises BrokenCheckpointError if it is not as it was written, ResumeError if it has keys or
        values that this version does not know.
        """
        path = self.path / CONFIG
        if file_facts(path) != self.files[CONFIG]:
            raise BrokenCheckpointError(f"{self.path}: {CONFIG} is not as it was written")
        try:
            return load_saved_config(path)
        except InvalidConfigError as error:
            raise ResumeError(
                f"{path} is of another version: {'; '.join(error.problems)}"
            ) from None

    @property
    def files(self) -> dict[str, FileFacts]:
        """Every file but meta.json and COMPLETE, by its path within the folder."""
        return {name: FileFacts(**facts) for name, facts in self.meta["files"].items()}

    def tensors(self, prefix: str = "weight/") -> dict[str, Tensor]:
        """The tensors whose key begins with `prefix`, whole, on the CPU; needs no process group.

        `weight/layers.0.q.3` is the master of unit layers.0.q.3: all keys are those of
        `parallel.checkpoint.state`. Raises BrokenCheckpointError if they cannot be read.
        """
        stored = StoredTensors(self.state)
        return stored.read(stored.keys(prefix))


def read_checkpoint(path: str | Path) -> CheckpointInfo:
    """The checkpoint in `path`: a step folder, or a run folder for its newest complete one.

    Needs no process group. Checks that it is complete and its files have their sizes; `problems`
    also compares their content. Raises BrokenCheckpointError, or ResumeError if there is none.
    """
    path = Path(path)
    if not (path / FOLDER).is_dir():
        return _complete(path)
    broken = []
    for step in sorted(steps(path), reverse=True):
        try:
            return _complete(step_folder(path, step))
        except BrokenCheckpointError as error:
            broken.append(str(error))
    raise ResumeError("; ".join([f"{path} has no complete checkpoint", *broken]))


def steps(run_dir: str | Path) -> list[int]:
    """The steps of the checkpoints in a run folder, in order, whether they can be loaded or not."""
    folder = Path(run_dir) / FOLDER
    names = [STEP.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in names if match)


def step_folder(run_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return Path(run_dir) / FOLDER / f"step_{step:08d}"


def _complete(path: Path) -> CheckpointInfo:
    """The checkpoint in a step folder. Raises BrokenCheckpointError if something is missing."""
    try:
        content = (path / META).read_bytes()
        marker = (path / COMPLETE).read_text().strip()
        if marker != hashlib.sha256(content).hexdigest():
            raise BrokenCheckpointError(f"{path}: {META} is not as it was written")
        meta = json.loads(content)
        found = meta.get("format") if isinstance(meta, dict) else None
        if found != FORMAT:
            raise BrokenCheckpointError(f"{path}: format must be {FORMAT}, got {found!r}")
        info = CheckpointInfo(path, meta)
        for name, facts in info.files.items():
            size = (path / name).stat().st_size
            if size != facts.bytes:
                raise BrokenCheckpointError(
                    f"{path}: {name} must have {facts.bytes} bytes, got {size}"
                )
    except OSError as error:
        raise BrokenCheckpointError(f"{error.filename or path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BrokenCheckpointError):
            raise
        raise BrokenCheckpointError(f"{path}: {META} cannot be read: {error}") from None
    return info


def problems(info: CheckpointInfo, share: slice = slice(None)) -> Iterator[str]:
    """A sentence for each file of a share of the checkpoint that is not as it was written."""
    for name, facts in sorted(info.files.items())[share]:
        try:
            same = file_facts(info.path / name) == facts
        except OSError as error:
            yield f"{info.path}: {name}: {error.strerror}"
            continue
        if not same:
            yield f"{info.path}: {name} is not as it was written"


def new_folder(run_dir: str | Path, step: int) -> Path:
    """A new folder to write the checkpoint of `step` to, with an empty `state` in it."""
    folder = Path(run_dir) / FOLDER / f".writing-{step}-{secrets.token_hex(4)}"
    (folder / STATE).mkdir(parents=True)
    return folder


def complete(
    folder: Path, run_dir: str | Path, meta: Mapping[str, Any], state: Mapping[str, FileFacts]
) -> Path:
    """The step folder that `folder`, which holds all but meta.json and COMPLETE, becomes; `state`
    as `seal` takes it. `name_latest` comes next."""
    seal(folder, meta, state)
    target = step_folder(run_dir, meta["step"])
    if target.exists():
        quarantine(target)
    folder.rename(target)
    return target


def seal(folder: Path, meta: Mapping[str, Any], state: Mapping[str, FileFacts]) -> None:
    """Write meta.json and COMPLETE into a checkpoint that has all else. `state` are the
    files in its state folder, already on the disk."""
    files = {f"{STATE}/{name}": facts for name, facts in state.items()}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sync(path)
            files[path.name] = file_facts(path)
    content = {**meta, "format": FORMAT, "files": {n: asdict(f) for n, f in files.items()}}
    text = json.dumps(content, indent=1) + "\n"
    write(folder / META, text)
    sync(folder)
    write(folder / COMPLETE, hashlib.sha256(text.encode()).hexdigest() + "\n")
    sync(folder)


def name_latest(run_dir: str | Path, name: str) -> None:
    """Let `latest` name a step folder, at every moment the old one or the new one. Both
    names are then on the disk."""
    folder = Path(run_dir) / FOLDER
    sync(folder)
    temporary = folder / f".writing-{LATEST}"
    write(temporary, name + "\n")
    temporary.rename(folder / LATEST)
    sync(folder)


def write(path: Path, text: str) -> None:
    """Write a file and brings it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Remove a folder, which from its first moment has no checkpoint's name any more."""
    doomed = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def quarantine(folder: Path) -> Path:
    """Where a broken checkpoint went: beside the others, under a name that is no step's."""
    aside = free_name(folder.with_name(f"broken-{folder.name}"))
    folder.rename(aside)
    return aside


def retire(run_dir: str | Path, *, keep_last: int | None, keep_every: int | None) -> list[int]:
    """The steps whose checkpoints were removed: all but the `keep_last` newest complete ones and
    those at multiples of `keep_every`. None keeps all, or none. Broken ones are left alone."""
    if keep_last is None:
        return []
    whole = [step for step in steps(run_dir) if _is_complete(step_folder(run_dir, step))]
    old = whole[:-keep_last]
    doomed = [step for step in old if keep_every is None or step % keep_every]
    for step in doomed:
        remove(step_folder(run_dir, step))
    return doomed


def _is_complete(path: Path) -> bool:
    try:
        _complete(path)
    except BrokenCheckpointError:
        return False
    return True


def sweep(run_dir: str | Path) -> list[str]:
    """The names of unfinished and half-removed checkpoints, which are removed. Call it only while
    no other process works in the folder."""
    folder = Path(run_dir) / FOLDER
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if UNFINISHED.fullmatch(path.name))
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return names


def set_aside_after(run_dir: str | Path, step: int, found: Iterable[int]) -> Path | None:
    """Where the checkpoints of later steps than `step` went, None if there are none: a run that
    goes on from an earlier one must not be continued from them."""
    later = [each for each in found if each > step]
    if not later:
        return None
    aside = free_name(Path(run_dir) / f"{FOLDER}-left-at-{step:08d}")
    aside.mkdir()
    for each in later:
        source = step_folder(run_dir, each)
        source.rename(aside / source.name)
    sync(aside)
    return aside


def free_name(path: Path) -> Path:
    """`path`, or the first of path.1, path.2, ... that does not exist."""
    number = 0
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
