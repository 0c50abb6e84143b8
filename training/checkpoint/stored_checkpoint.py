"""A checkpoint on disk: its meta.json, config, tensors and effective weights."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ConfigDict
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.blocks.in_graph_pc import GAMMA
from models.families import all_units
from models.section import Whole
from models.units import Unit
from parallel.checkpoint.safe_index import INDEX_FILE, PLAIN_FILE, Reader, read_index
from parallel.checkpoint.state_writer import FileFacts, file_facts
from parallel.error_text import last_line
from spectral.batching import grouped
from training.assignments import unit_options
from training.config import Config, InvalidConfigError, MissingRuleError, load_saved_config
from training.data.order import Progress
from training.errors import BrokenCheckpointError, InputError

FORMAT: Final = 2
"""Version of the checkpoint format. Bump it when this code can no longer read older checkpoints."""


META, CONFIG, RNG, STATE = "meta.json", "config.yaml", "rng.pt", "state"
WEIGHTS: Final = (CONFIG, f"{STATE}/{INDEX_FILE}")
"""Files that every checkpoint contains, even one of imported weights."""
REQUIRED: Final = (*WEIGHTS, RNG, f"{STATE}/{PLAIN_FILE}")
"""Files that every checkpoint saved by a run contains."""


STEP: Final = re.compile(r"step_([0-9]{8,})")


@dataclass(frozen=True)
class Meta:
    """Required entries of meta.json for imported weights."""

    __pydantic_config__ = ConfigDict(strict=True)

    step: Whole
    files: dict[str, FileFacts]
    identity: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Guard:
    """State of `NonFiniteGuard`."""

    skipped: int
    in_a_row: list[tuple[int, int]]


@dataclass(frozen=True)
class TrainerState:
    """Non-tensor state of a trainer."""

    guard: Guard
    spikes: list[float]
    spectral: dict[str, float]


@dataclass(frozen=True)
class RunMeta(Meta):
    """Required entries of meta.json for checkpoints saved by a run."""

    run_id: str
    progress: Progress
    trainer: TrainerState

    def __post_init__(self) -> None:
        if missing := {"data", "tokenizer"} - self.identity.keys():
            keys = " and ".join(sorted(missing))
            raise ValueError(f"identity must contain {keys}, got {[*self.identity]}")
        if self.progress.step != self.step:
            rule = f"step must equal progress.step = {self.progress.step}"
            raise ValueError(f"{rule}, got {self.step}")


@dataclass(frozen=True)
class AveragedCheckpoints:
    """The steps of a run whose weights were averaged, and each step's weight in the average."""

    steps: list[int]
    weights: list[float]
    on_sphere: bool


@dataclass(frozen=True)
class AverageMeta(Meta):
    """Required entries of meta.json for averages of checkpoints. `progress` is copied from the last
    averaged checkpoint."""

    averaged: AveragedCheckpoints
    progress: Progress


class ResumeError(InputError):
    """Raised when a run cannot resume as requested."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint.

    path    checkpoint folder
    meta    contents of meta.json
    sha256  hash of meta.json, which contains the hashes of all other files
    """

    path: Path
    meta: Mapping[str, Any]
    sha256: str

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return int(self.meta["step"])

    @property
    def imported(self) -> bool:
        """Whether the weights were imported from another program's model."""
        return self.meta.get("weights_only") is True and "averaged" not in self.meta

    @property
    def tokenizer_sha256(self) -> str | None:
        """Hash of the tokenizer of the run's data or of the imported model, if known."""
        sha256: str | None = self.meta["identity"].get("tokenizer", {}).get("sha256")
        return sha256

    @property
    def state(self) -> Path:
        """Folder `state` of the checkpoint, as expected by
        `parallel.checkpoint.state.load_state`."""
        return self.path / STATE

    @property
    def config(self) -> Config:
        """Config of the run that saved the checkpoint, with the vocabulary size filled in.

        Raises BrokenCheckpointError if the file has changed since it was written, and ResumeError
        if it contains keys or values not accepted by this version.
        """
        path = self.path / CONFIG
        if file_facts(path) != self.files[CONFIG]:
            raise BrokenCheckpointError(changed(self.path, CONFIG))
        try:
            return load_saved_config(path)
        except MissingRuleError as error:
            raise ResumeError(f"cannot use {path}: {error}") from None
        except InvalidConfigError as error:
            raise ResumeError(
                f"{path} was written by another version: {'; '.join(error.problems)}"
            ) from None

    @property
    def files(self) -> dict[str, FileFacts]:
        """Size and hash of every file except meta.json and COMPLETE, by relative path."""
        return {name: FileFacts(**facts) for name, facts in self.meta["files"].items()}


def changed(folder: Path, name: str) -> str:
    """Return the error message for a checkpoint file whose hash has changed."""
    return f"{folder}: {name} has changed since it was written"


class StoredTensors:
    """Reads the tensors stored in `folder`, which may have been saved on any layout.

    `parallel.checkpoint.state` defines the keys. The constructor reads the index; `read_into` and
    `read` read tensors. All methods raise BrokenCheckpointError if the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = read_index(folder)
        except Exception as error:
            raise broken(folder, error) from error
        self._reader = Reader(folder, index)
        self._tensors = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`."""
        return [key for key in self._tensors if key.startswith(prefix)]

    def empty(self, key: str, device: str = "cpu") -> Tensor:
        """Return an uninitialised tensor with the shape and dtype of the stored tensor `key`.

        Raises BrokenCheckpointError if there is no such tensor, or if its index entry is invalid.
        """
        if key not in self:
            raise BrokenCheckpointError(f"{self.folder} must contain {key}")
        entry = self._tensors[key]
        try:
            return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        except Exception as error:  # invalid index entries raise various exceptions
            raise broken(self.folder, error) from error

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Read stored tensors into `targets`, which maps their keys to the tensors to fill. Shapes
        must match."""
        for key, target in targets.items():
            shape = self.empty(key, "meta").shape
            if target.shape != shape:
                raise BrokenCheckpointError(
                    f"{self.folder}: {key} must have shape {tuple(target.shape)}, "
                    f"got {tuple(shape)}"
                )
        self._read_into(targets)

    def _read_into(self, targets: Mapping[str, Tensor]) -> None:
        try:
            self._reader.read_into(targets)
        except (Exception, CheckpointException) as error:
            raise broken(self.folder, error) from error

    def batches(self, keys: Iterable[str], max_bytes: int = 1 << 26) -> Iterator[list[str]]:
        """Split `keys` into lists, each with at most `max_bytes` bytes of tensors. A larger tensor
        gets its own list.

        Reading several small tensors at once is faster.
        """
        batch, size = list[str](), 0
        for key in keys:
            own = self.empty(key, "meta").nbytes
            if batch and size + own > max_bytes:
                yield batch
                batch, size = [], 0
            batch.append(key)
            size += own
        if batch:
            yield batch

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the full tensors for `keys` on the CPU, in the dtypes in which they are stored."""
        tensors = {key: self.empty(key) for key in keys}
        self._read_into(tensors)
        return tensors


def abridged(keys: Collection[str]) -> str:
    """Shorten a list of tensor names to its first name and the number of other names.

    Example: `weight/head (and 79 others)`.
    """
    first, others = min(keys), len(keys) - 1
    return f"{first} (and {others} other{'s' if others > 1 else ''})" if others else first


def broken(folder: Path, error: BaseException) -> BrokenCheckpointError:
    """Return the error for an unreadable folder."""
    return BrokenCheckpointError(f"{folder} cannot be read: {last_line(error)}")


class CheckpointWeights:
    """Reads whole parameters by name. Each parameter is assembled from its units in the checkpoint,
    which may have been saved on any layout.

    For PC layers, the parameter is PC(W), computed in float32 from the stored W, gamma, u and v.
    The constructor raises BrokenCheckpointError if the stored units do not match the config's
    model.

    units       units of the model
    parameters  units of each parameter, by the name of the parameter
    """

    def __init__(self, info: CheckpointInfo) -> None:
        self.info = info
        self.config = info.config
        self._stored = StoredTensors(info.state)
        self.units = all_units(self.config.model, **unit_options(self.config))
        self.parameters = grouped(self.units, lambda unit: unit.parameter)
        expected = {f"weight/{unit.name}" for unit in self.units}
        present = {key for key in self._stored.keys("weight/") if not key.endswith(GAMMA)}
        if expected - present:
            raise BrokenCheckpointError(
                f"{info.path} is missing weights of the model in {CONFIG}: "
                f"{abridged(expected - present)}"
            )
        if present - expected:
            raise BrokenCheckpointError(
                f"{info.path} contains weights that do not belong to the model in {CONFIG}: "
                f"{abridged(present - expected)}"
            )

    def layouts(self) -> dict[str, tuple[int, ...]]:
        """Map the name of each parameter to `view_shape`, the shape to which the parameter is
        reshaped before it is split into units.

        Flattening all axes but the last gives the parameter's shape.
        """
        return {name: units[0].view_shape for name, units in self.parameters.items()}

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all stored module buffers, by name."""
        keys = self._stored.keys("buffer/")
        return {k.removeprefix("buffer/"): tuple(self._stored.empty(k).shape) for k in keys}

    def parameter(self, name: str) -> Tensor:
        """Return the full parameter `name` in float32, in its units' `view_shape`.

        Raises BrokenCheckpointError if the shape of a unit does not match.
        """
        units = self.parameters[name]
        whole = torch.empty(units[0].view_shape, dtype=torch.float32)
        plain = [unit for unit in units if not self.preconditioned(unit)]
        self._stored.read_into({f"weight/{u.name}": u.view(whole) for u in plain})
        for unit in units:
            if self.preconditioned(unit):
                unit.view(whole).copy_(self.effective(unit).view(unit.axes))
        return whole

    def preconditioned(self, unit: Unit) -> bool:
        """Return whether a unit is a PC layer."""
        return self.config.pc is not None and self.config.pc.covers(unit)

    def weight(self, unit: Unit) -> Tensor:
        """Return a unit's float32 W `[*shape]`. For PC layers, this is not the effective weight."""
        key = f"weight/{unit.name}"
        return self._stored.read([key])[key].float().reshape(unit.shape)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the module buffer `name`, or zeros `[*shape]` if the checkpoint does not contain
        the buffer. An expert bias may be missing from the checkpoint."""
        key = f"buffer/{name}"
        if key not in self._stored:
            return torch.zeros(shape)
        return self._stored.read([key])[key].float()

    def effective(self, unit: Unit) -> Tensor:
        """Return a PC layer's float32 PC(W) `[rows, cols]`."""
        pc = self.config.pc
        assert pc is not None
        keys = [f"pc/{unit.name}/u", f"pc/{unit.name}/v", f"weight/{unit.name}{GAMMA}"]
        stored = self._stored.read(keys)
        u, v, gamma = (stored[each].float() for each in keys)
        preconditioner = pc.preconditioner(unit)
        assert preconditioner is not None
        with torch.no_grad():
            return preconditioner.effective(self.weight(unit)[None], u[None], v[None], gamma)[0]


class LastParameter:
    """Caches the last parameter read, because all units of a parameter are read consecutively."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        """`read` returns the value of a parameter, given its name."""
        self._read = read
        self._name = ""
        self._value = torch.empty(0)

    def unit(self, unit: Unit) -> Tensor:
        """Return a whole unit `[*axes]`."""
        if unit.parameter != self._name:
            self._value = torch.empty(0)  # freed before the next parameter is read
            self._name, self._value = unit.parameter, self._read(unit.parameter)
        return unit.view(self._value)
