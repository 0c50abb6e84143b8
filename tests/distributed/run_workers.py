"""Functions that the ranks run in the tests of whole runs."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from parallel.checkpoint.state import load_state
from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from parallel.optimizer.distributed_optimizer import DisagreementError
from tests.distributed.state_workers import label, started
from tests.run_configs import read_config
from tests.saved_state import save_state
from training import build
from training.build import build_trainer, restore
from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.data.build_data import build_data
from training.loop import Hooks, Loop, Outcome
from training.run import train
from training.step import StepResult, Trainer

PREEMPTIONS = 3
BF16: dict[str, Any] = {"train__precision": "bf16"}
INTEGERS = {2: torch.int16, 4: torch.int32}


def runs(folder: str, layouts: list[dict[str, int]], keys: dict[str, Any]) -> list[str]:
    """Make the runs in `folder`, and return this rank's stack traces during a hang and its messages
    about differing copies.

    layouts that continue FOLDER/one from step 2 to step 4
    keys    of every run's config
    """
    said = []
    for number, (layout, groups) in enumerate(started(layouts)):
        if number == 0:
            same_layout(folder, groups, keys)
            said.append(hang(folder, groups, keys))
        said.append(other_layout(folder, groups, layout, keys))
        if layout == {"tensor": 2}:
            resumed_twice(folder, groups, keys | {"parallel__tensor": 2})
    return said


def resumed_twice(folder: str, groups: Groups, keys: dict[str, Any]) -> None:
    """Train "FOLDER/resumed whole" in one start, and "FOLDER/resumed twice" in three starts, in
    bfloat16 and with PC layers. Each rank's random number generator continues as well."""
    torch.manual_seed(groups.rank)
    random_state = torch.get_rng_state()
    name, more = "resumed", BF16 | {"pc__level": 2, "train__steps": 3}
    more |= {"checkpoint__keep_last": 1, "validation__interval": 1}
    for stop in (1, 2, 3):
        twice = {**keys, **more, "train__exit_step": stop, "run__dir": f"{folder}/{name} twice"}
        assert train(read_config(folder, **twice), groups).step == stop
        assert torch.equal(torch.get_rng_state(), random_state)
        torch.manual_seed(len(name))
    whole = {**keys, **more, "train__exit_step": 3, "run__dir": f"{folder}/{name} whole"}
    train(read_config(folder, **whole), groups)


def other_layout(folder: str, groups: Groups, layout: dict[str, int], keys: dict[str, Any]) -> str:
    """Resume the run of one process on a layout, and return the result of `differing_copies`.

    FOLDER/LAYOUT contains the resumed run, and "FOLDER/LAYOUT loaded" contains the loaded state.
    """
    place = f"{folder}/{label(layout)}"
    if groups.rank == 0:
        shutil.copytree(f"{folder}/one", place)
    dist.barrier()
    parallel = {f"parallel__{key}": size for key, size in layout.items()}
    config = read_config(folder, **keys, **parallel, run__dir=place)
    trainer = build_trainer(config, groups, *build_data(config))
    info = read_checkpoint(step_folder(place, 2))
    restore(trainer, info)
    save_state(f"{place} loaded/state", trainer.model, trainer.optimizer)
    dist.barrier()
    said = differing_copies(trainer, info, groups)
    train(config, groups)
    return said


def differing_copies(trainer: Trainer, info: CheckpointInfo, groups: Groups) -> str:
    """Return the error raised after a load in which the copies of a weight on ranks 0 and 1 differ
    in one bit."""
    part = trainer.model.domains[0]
    copied = part.domain.replicas.size > 1
    shared = next(unit for unit in part.units if copied or unit.replicated)

    def load_with_an_error(*arguments: Any) -> dict[str, Any]:
        extra = load_state(*arguments)
        if groups.rank == 1:
            weight = trainer.model.parameters[shared.parameter].data.view(torch.int32)
            weight.view(-1)[3] ^= 1
        return extra

    build.load_state = load_with_an_error
    try:
        restore(trainer, info)
    except DisagreementError as error:
        return f"{shared.parameter}: {error}"
    finally:
        build.load_state = load_state
    return "not noticed"


def same_layout(folder: str, groups: Groups, keys: dict[str, Any]) -> None:
    """Train FOLDER/whole in one start and FOLDER/preempted in several starts, in bfloat16.

    A signal to either rank or a STOP file stops FOLDER/preempted at random steps.
    """
    more = {"train__steps": 8, "train__exit_step": 8, "validation__interval": 2}
    more |= BF16 | {"checkpoint__interval": 5}
    config = read_config(folder, **{**keys, **more}, run__dir=f"{folder}/whole")
    train(config, groups)
    config = read_config(folder, **{**keys, **more}, run__dir=f"{folder}/preempted")
    chance = random.Random(13)  # a signal to either rank, and a STOP file
    reasons = [preempted(config, groups, chance) for _ in range(PREEMPTIONS)]
    if groups.rank == 0:
        Path(f"{folder}/reasons.txt").write_text("\n".join(reasons))
    assert train(config, groups).stopped is None


def preempted(config: Any, groups: Groups, chance: random.Random) -> str:
    """Start the run, stop it after one or two steps, and return the reason for the stop."""
    # All ranks draw the same numbers.
    how, steps = chance.choice(["signal 0", "signal 1", "STOP file"]), chance.randint(1, 2)
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
    seen: list[int] = []

    def stop(step: int, result: StepResult) -> None:
        seen.append(step)
        if len(seen) != steps:
            return
        if how == f"signal {groups.rank}":
            os.kill(os.getpid(), number)
        if how == "STOP file" and groups.rank == 0:
            (Path(config.run.dir) / "STOP").touch()

    outcome: Outcome = train(config, groups, on_step=stop)
    assert outcome.stopped is not None and outcome.step == seen[-1], outcome
    assert not (Path(config.run.dir) / "STOP").exists() or groups.rank > 0
    dist.barrier()
    return outcome.stopped


def stacks(place: str, rank: int) -> str:
    """Return the stack traces that a rank has written so far."""
    file = Path(f"{place}/stacks/rank_{rank:05d}.txt")
    return file.read_text() if file.exists() else ""


def hang(folder: str, groups: Groups, keys: dict[str, Any]) -> str:
    """Return the stack traces that this rank wrote while rank 1 was paused."""
    place = f"{folder}/hang"
    config = read_config(folder, **{**keys, "watchdog__hang_seconds": 8}, run__dir=place)

    def stand_still(step: int, result: StepResult) -> None:
        if step == 2 and groups.rank == 1:
            # Wait until both ranks have written: an empty file is removed at the end of its run.
            for _ in range(1200):  # ten minutes
                if stacks(place, 0) and "stand_still" in stacks(place, 1):
                    break
                time.sleep(0.5)

    train(config, groups, on_step=stand_still)
    dist.barrier()
    return stacks(place, groups.rank)


def killed(folder: str, what: str, keys: dict[str, Any]) -> None:
    """Train a run whose process is killed while it saves step 3.

    The killed process is rank 1, the writer of rank 1, or every rank.
    """
    groups = process_groups.initialize()
    config = read_config(folder, **keys, run__dir=f"{folder}/{what}")
    parent, write = os.getpid(), FileSystemWriter.write_data

    def die(writer: FileSystemWriter, *arguments: Any) -> Any:
        if (groups.rank == 1 or what == "all ranks") and "-3-" in str(writer.path):
            if what != "writer":
                os.kill(parent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(writer, *arguments)

    FileSystemWriter.write_data = die
    train(config, groups)


def flips(
    folder: str, layout: dict[str, int], cases: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, tuple[int, int, str, str | None]]:
    """For each case, return the rank with changed memory, this rank's last step and error, and the
    changed weight.

    cases   what is flipped, keys of the config
    """
    found = {}
    for _, groups in started([layout]):
        for name, (what, keys) in cases.items():
            found[name] = flipped(folder, groups, what, keys)
    return found


def flipped(
    folder: str, groups: Groups, what: str, keys: dict[str, Any]
) -> tuple[int, int, str, str | None]:
    """After step 3, flip one bit of a weight of kind `what` on the last rank that has one, and
    continue training."""

    def flip(step: int, result: object) -> None:
        if step == 3 and dist.get_rank() == chosen:
            _, flat = memory(trainer, what)
            assert flat is not None
            flat.view(INTEGERS[flat.element_size()])[flat.numel() - 1] ^= 1

    config = read_config(folder, **keys)
    trainer = build_trainer(config, groups, *build_data(config))
    names = from_all(memory(trainer, what)[0])
    chosen = max((rank for rank, name in enumerate(names) if name), default=-1)
    try:
        outcome = Loop(trainer, Hooks(on_step=flip)).run()
    except DisagreementError as error:
        return chosen, trainer.progress.step, str(error), names[chosen]
    return chosen, outcome.step, "", names[chosen]


def memory(trainer: Trainer, what: str) -> tuple[str | None, Tensor | None]:
    """Return the name and the flat memory of the last weight of kind `what`, or None and None."""
    part, domain = trainer.model.domains[0], trainer.optimizer.domains[0]
    bucket = part.bucket_layout.buckets[-1]
    slot = bucket.slots[-1]
    if what == "parameter":
        return slot.parameter, part.parameters[-1].narrow(0, slot.offset, slot.numel)
    if what == "master":
        size = part.masters[-1].numel()
        end = min(slot.offset + slot.numel - part.domain.replicas.rank * size, size)
        return slot.parameter, part.masters[-1][:end]
    for group in domain.step_groups:
        if what == "kept" and group.kept:
            name, weight = list(group.kept.items())[-1]
            return name, weight.view(-1)
        if what == "PC layer" and group.materialized.stacks:
            stack = group.materialized.stacks[-1]
            return stack.units[-1].name, stack.weight.view(-1)
    return None, None


def trained(folder: str, keys: dict[str, Any]) -> None:
    """Train the config in `folder`, with `keys` changed."""
    groups = process_groups.initialize()
    train(read_config(folder, **keys), groups)
    process_groups.shutdown()
