"""Writer of the state of a weights-only checkpoint, with one parameter in memory at a time."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from models.families import all_units
from models.units import Unit
from parallel.checkpoint.safe_index import PLAIN_FILE
from parallel.checkpoint.state import SCHEMA
from parallel.checkpoint.state_writer import FileFacts, StateWriter, file_facts, write_plain
from training.assignments import unit_options
from training.config import Config
from training.errors import InputError
from training.report.progress import progress
from training.report.table import short

Read = Callable[[str], Tensor]
"""Function from the name of a parameter or buffer to its value, float32."""


def write_state(
    folder: Path, config: Config, read: Read, buffers: Mapping[str, tuple[int, ...]], step: int = 0
) -> dict[str, FileFacts]:
    """Write the files of a checkpoint's state to `folder`; return their facts by name.

    Parameters are read in their units' view shape; `buffers` contains the shapes of buffers by
    name. Raises InputError like `read`.
    """
    last = LastParameter(read)
    units = all_units(config.model, **unit_options(config))
    shapes = {f"weight/{unit.name}": unit.axes for unit in units}
    sources: dict[str, Callable[[], Tensor]] = {
        f"weight/{unit.name}": partial(last.unit, unit) for unit in units
    }
    for name, shape in buffers.items():
        shapes[f"buffer/{name}"] = shape
        sources[f"buffer/{name}"] = partial(read, name)
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    total = short(sum(tensor.numel() for tensor in state.values()))
    writer, planner = StateWriter(folder), LazyPlanner(sources)
    with (
        progress(lambda: f"{short(planner.written)} of {total} parameters are written"),
        warnings.catch_warnings(),  # a save by one process is intended
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            raise next((c for c in causes if isinstance(c, InputError)), error) from None
    write_plain(folder / PLAIN_FILE, {"schema": SCHEMA, "extra": {"step": step}})
    return {path.name: file_facts(path) for path in sorted(folder.iterdir())}


class LastParameter:
    """Cache of the parameter that was read last, as the units of a parameter are consecutive."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._name = ""
        self._value = torch.empty(0)

    def unit(self, unit: Unit) -> Tensor:
        """Return a whole unit `[*axes]`, float32."""
        if unit.parameter != self._name:
            self._value = torch.empty(0)  # before the next unit is in memory
            self._name, self._value = unit.parameter, self._read(unit.parameter)
        return unit.view(self._value)


class LazyPlanner(DefaultSavePlanner):
    """Creates tensors when they are written; before that, the state contains only shapes.

    written    number of elements written so far
    """

    def __init__(self, sources: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._sources = sources
        self._last: Tensor | None = None
        self.written = 0

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of an item of the plan."""
        if self._last is not None:  # torch's writer keeps every tensor until the end
            self._last.untyped_storage().resize_(0)
        value = self._last = self._sources[write_item.index.fqn]().clone()
        self.written += value.numel()
        return value
