"""Effective weights of a checkpoint, one parameter at a time, in float32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from models.blocks.in_graph_pc import GAMMA
from models.families import all_units
from models.units import Unit
from spectral.batching import grouped
from training.assignments import unit_options
from training.checkpoint.checkpoints import CheckpointInfo
from training.checkpoint.stored_tensors import StoredTensors, named
from training.errors import BrokenCheckpointError


class CheckpointWeights:
    """Parameters by name, assembled from the units of a checkpoint saved on any layout.

    The weight of a PC layer is PC(W), computed in float32 from the checkpoint's W, gamma, u and v.
    """

    def __init__(self, info: CheckpointInfo) -> None:
        self.info = info
        self.config = info.config
        self._stored = StoredTensors(info.state)
        units = all_units(self.config.model, **unit_options(self.config))
        self._units = grouped(units, lambda unit: unit.parameter)

    def layouts(self) -> dict[str, tuple[int, ...]]:
        """Return, by parameter, the shape in which its units view it.

        With all axes but the last flattened, it is the parameter's own shape.
        """
        return {name: units[0].view_shape for name, units in self._units.items()}

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every stored module buffer, by name."""
        keys = self._stored.keys("buffer/")
        return {k.removeprefix("buffer/"): tuple(self._stored.empty(k).shape) for k in keys}

    def parameter(self, name: str, layout: tuple[int, ...]) -> Tensor:
        """Return a whole parameter `[*layout]`, float32.

        Raises BrokenCheckpointError if a part of it is missing or has another shape.
        """
        whole = torch.empty(layout, dtype=torch.float32)
        units = self._units[name]
        plain = [unit for unit in units if not self.preconditioned(unit)]
        self._stored.read_into({f"weight/{u.name}": u.view(whole) for u in plain})
        for unit in units:
            if self.preconditioned(unit):
                unit.view(whole).copy_(self.effective(unit).view(unit.axes))
        return whole

    def units(self) -> Iterator[Unit]:
        """Yield every unit of the model, parameter by parameter."""
        for units in self._units.values():
            yield from units

    def preconditioned(self, unit: Unit) -> bool:
        """Return whether a unit is a PC layer."""
        return self.config.pc is not None and self.config.pc.covers(unit)

    def weight(self, unit: Unit) -> Tensor:
        """Return a unit's W `[*shape]`, float32; of a PC layer that is not the effective weight."""
        key = f"weight/{unit.name}"
        return self._stored.read([key])[key].float().reshape(unit.shape)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a module's buffer, or zeros `[*shape]`, which stand for an expert bias of none."""
        key = f"buffer/{name}"
        if key not in self._stored:
            return torch.zeros(shape)
        return self._stored.read([key])[key].float()

    def check(self) -> None:
        """Raise BrokenCheckpointError if the weights are not those of the config's model."""
        wanted = {f"weight/{unit.name}" for unit in self.units()}
        stored = self._stored.keys("weight/")
        found = {key for key in stored if not key.endswith(GAMMA)}
        if wanted - found:
            raise BrokenCheckpointError(f"{self.info.path} lacks {named(wanted - found)}")
        if found - wanted:
            raise BrokenCheckpointError(
                f"{self.info.path} has {named(found - wanted)}, unlike its config's model"
            )

    def effective(self, unit: Unit) -> Tensor:
        """Return PC(W) `[rows, cols]` of a PC layer, float32."""
        pc = self.config.pc
        assert pc is not None
        key = f"weight/{unit.name}"
        keys = [f"pc/{unit.name}/u", f"pc/{unit.name}/v", f"{key}{GAMMA}"]
        missing = [each for each in (key, *keys) if each not in self._stored]
        if missing:
            raise BrokenCheckpointError(f"{self.info.path} lacks {missing[0]}")
        stored = self._stored.read(keys)
        u, v, gamma = (stored[each].float() for each in keys)
        preconditioner = pc.preconditioner(unit)
        assert preconditioner is not None
        with torch.no_grad():
            return preconditioner.effective(self.weight(unit)[None], u[None], v[None], gamma)[0]
