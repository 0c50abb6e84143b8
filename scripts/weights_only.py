"""Write weights-only checkpoints with one parameter in memory at a time, and average a run's
checkpoints."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from models.families import all_units
from models.units import Unit
from parallel.checkpoint.state_writer import StateWriter, file_facts, write_extra
from scripts.command import check_free
from scripts.data.folder import AtomicFolder
from scripts.huggingface.export import check_room, raise_problems
from spectral.singular_triplets import COLD_STEPS, top_singular
from training.assignments import config_assignments, unit_options
from training.checkpoint import checkpoints
from training.checkpoint.changes import changes
from training.checkpoint.identity import settings
from training.checkpoint.stored_checkpoint import (
    CONFIG,
    STATE,
    AveragedCheckpoints,
    CheckpointInfo,
    CheckpointWeights,
    LastParameter,
)
from training.config import Config, to_yaml
from training.errors import InputError
from training.machine.device import versions
from training.report.text import progress, short

Read = Callable[[str], Tensor]
"""Function that takes the name of a parameter or buffer and returns its value in float32."""


def write_checkpoint(
    target: Path,
    config: Config,
    read: Read,
    buffers: Mapping[str, tuple[int, ...]],
    meta: Callable[[Path], Mapping[str, Any]],
) -> None:
    """Write a checkpoint without optimizer state to a new folder `target`.

    `read` must return each parameter in its units' `view_shape`. `buffers` maps buffer names to
    shapes. `meta` is called with the folder once all weights are written. `meta` may add files, and
    returns the leading entries of meta.json, including `step`. Raises InputError if `target`
    exists, if there is not enough disk space, or if `read` or `meta` raises InputError.
    """
    units = all_units(config.model, **unit_options(config))
    check_room(target, 4 * sum(unit.numel for unit in units))
    with AtomicFolder(target, partial(check_free, target)) as folder:
        state = folder.path / STATE
        state.mkdir()
        write_state(state, units, read, buffers)
        (folder.path / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        content = {**meta(folder.path), "weights_only": True, "versions": versions()}
        checkpoints.check_name(target, content["step"])
        write_extra(state, {"step": content["step"]})
        facts = {path.name: file_facts(path) for path in sorted(state.iterdir())}
        checkpoints.seal(folder.path, content, facts)
        folder.commit()


def write_state(
    folder: Path, units: Sequence[Unit], read: Read, buffers: Mapping[str, tuple[int, ...]]
) -> None:
    """Write a checkpoint's tensors to `folder`."""
    last = LastParameter(read)
    state, sources = dict[str, Tensor](), dict[str, Callable[[], Tensor]]()
    for unit in units:
        state[f"weight/{unit.name}"] = torch.empty(unit.axes, device="meta")
        sources[f"weight/{unit.name}"] = partial(last.unit, unit)
    for name, shape in buffers.items():
        state[f"buffer/{name}"] = torch.empty(shape, device="meta")
        sources[f"buffer/{name}"] = partial(read, name)
    total = short(sum(tensor.numel() for tensor in state.values()))
    writer, planner = StateWriter(folder), LazyPlanner(sources)
    with (
        progress(lambda: f"{short(planner.written)} of {total} parameters written"),
        warnings.catch_warnings(),  # torch warns about saving without torch.distributed
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            raise next((c for c in causes if isinstance(c, InputError)), error) from None


class LazyPlanner(DefaultSavePlanner):
    """Save planner that creates each tensor only when it is written. The state dict only holds
    shapes.

    written    number of elements written so far
    """

    def __init__(self, sources: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._sources = sources
        self._last: Tensor | None = None
        self.written = 0

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor for a write item and free the previous tensor."""
        if self._last is not None:  # torch's writer keeps a reference to every tensor
            self._last.untyped_storage().resize_(0)
        value = self._last = self._sources[write_item.index.fqn]().clone()
        self.written += value.numel()
        return value


def average(
    infos: Sequence[CheckpointInfo], weights: Sequence[float], target: Path, *, on_sphere: bool
) -> list[float]:
    """Write the weighted mean of checkpoints as a weights-only checkpoint to a new folder `target`.

    `weights` sum to 1. With `on_sphere`, sphere-rule matrices are rescaled to their radius. Returns
    the norm-to-radius ratio of each sphere-rule matrix before rescaling. Raises InputError if the
    checkpoints differ in run, model or tokenizer, or if `target` exists.
    """
    check_free(target)
    last = infos[-1]
    for info in infos:
        if (run := info.meta.get("run_id")) != last.meta.get("run_id") or run is None:
            raise InputError(
                f"{info.path} must be from the same run as {last.path} (run_id "
                f"{last.meta.get('run_id')}), got run_id {run}"
            )
        different = list(changes(_model(info), _model(last)))
        if different:
            raise InputError(
                f"{info.path} must have the same model as {last.path}, but these settings differ: "
                f"{', '.join(map(str, different))}"
            )
    for info in infos:
        raise_problems(info)
    mean = Mean([CheckpointWeights(info) for info in infos], weights, on_sphere=on_sphere)
    kept = ("step", "identity", "progress", "initialized_from")
    meta = {key: last.meta[key] for key in kept if key in last.meta}
    used = AveragedCheckpoints([info.step for info in infos], list(weights), on_sphere)
    meta["averaged"] = asdict(used)
    config = replace(mean.config, pc=None)
    write_checkpoint(target, config, mean.read, mean.buffers, lambda folder: meta)
    return mean.norms


def _model(info: CheckpointInfo) -> dict[str, Any]:
    """Return the model settings and tokenizer hash of a checkpoint."""
    return settings(info.config)["model"] | {"tokenizer": info.tokenizer_sha256}


class Mean:
    """The weighted mean of checkpoints, computed one parameter or buffer at a time.

    buffers  shape of each buffer
    norms    ratio of spectral norm to radius, for each sphere-rule matrix read so far
    """

    def __init__(
        self, checkpoints: Sequence[CheckpointWeights], weights: Sequence[float], *, on_sphere: bool
    ) -> None:
        self._last = checkpoints[-1]
        self.config: Config = self._last.config
        self.buffers: Mapping[str, tuple[int, ...]] = self._last.buffer_shapes()
        self.norms: list[float] = []
        self._parts = list(zip(checkpoints, weights, strict=True))
        self._on_sphere = on_sphere
        self._assign = config_assignments(self.config)

    def read(self, name: str) -> Tensor:
        """Return a parameter in its units' `view_shape`, or a buffer, in float32."""
        if name in self.buffers:
            shape = self.buffers[name]
            return weighted_sum((each.buffer(name, shape), weight) for each, weight in self._parts)
        units = self._last.parameters[name]
        shape = units[0].view_shape
        parts = ((each.parameter(name).view(shape), weight) for each, weight in self._parts)
        whole = weighted_sum(parts)
        for unit in units:
            if not self._last.preconditioned(unit):
                self._measure(unit, unit.view(whole))
        return whole

    def _measure(self, unit: Unit, matrix: Tensor) -> None:
        """Record the norm-to-radius ratio of a sphere-rule matrix, and rescale the matrix if
        requested."""
        radius = self._assign(unit).rule.radius_of(unit.shape)
        if radius is None:
            return
        rows, cols = unit.shape
        stack = matrix.reshape(1, rows, cols)
        zeros = torch.zeros(1, rows), torch.zeros(1, cols)
        norm = top_singular(stack, *zeros, steps=COLD_STEPS)[0].item()
        self.norms.append(norm / radius)
        if self._on_sphere and norm > 0:
            matrix.mul_(radius / norm)


def weighted_sum(parts: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Return a weighted sum of tensors in float32, accumulated in float64."""
    total = torch.zeros(())
    for i, (value, weight) in enumerate(parts):
        total = torch.zeros_like(value, dtype=torch.float64) if not i else total
        total.add_(value, alpha=weight)
    return total.float()
