"""Initial weights, which depend on a unit's name and the seed, and on no rank or layout."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from models.config import InitConfig
from models.units import Unit
from spectral.sphere import radius

RESIDUAL_OUTPUTS = ("o", "down", "shared_down", "expert_down")
VOCABULARY = ("embedding", "head")


def initialize_(
    parameters: Mapping[str, Tensor],
    units: Iterable[Unit],
    init: InitConfig,
    *,
    seed: int,
    layers: int,
    tensor_rank: int = 0,
    tensor_size: int = 1,
    given: Callable[[Unit], Tensor] | None = None,
) -> None:
    """Fill every unit of `parameters` in place.

    With `given` by the whole units `[*shape]` that it returns, else by new ones: a cut unit is
    drawn whole, normalised whole and then cut, so that any tensor-parallel size gives the same
    model. Gains have their start value. Matrices are N(0, std^2); with `init.spectral` each is
    rescaled to the spectral norm of its sphere ("Controlled LLM Training on Spectral Sphere",
    section 4).
    """
    with torch.no_grad():
        for unit in units:
            target = unit.view(parameters[unit.parameter])
            if given is not None:
                target.copy_(unit.piece(given(unit), tensor_rank, tensor_size))
                continue
            if not unit.is_matrix:
                target.fill_(unit.start)
                continue
            whole = draw(unit, init, seed=seed, layers=layers)
            if init.spectral and unit.role not in VOCABULARY:
                whole = whole.to(target.device)
                rows, cols = unit.shape
                goal = radius((rows, cols), init.radius, init.radius_scaler)
                whole *= goal / torch.linalg.matrix_norm(whole, ord=2)
            target.copy_(unit.piece(whole, tensor_rank, tensor_size))


def draw(unit: Unit, init: InitConfig, *, seed: int, layers: int) -> Tensor:
    """Draw a whole unit `[rows, cols]` from its normal distribution, float32 on the CPU."""
    std = standard_deviation(unit.role, init, layers)
    cols = unit.shape[-1]
    return torch.cat([std * normal(name, (rows, cols), seed) for name, rows in unit.draws])


def standard_deviation(role: str, init: InitConfig, layers: int) -> float:
    """Return the standard deviation of the matrices of `role`."""
    if role in VOCABULARY:
        return init.embedding_std if role == "embedding" else init.head_std
    depth = math.sqrt(2 * layers) if init.depth_scaled and role in RESIDUAL_OUTPUTS else 1.0
    return init.std / depth


def normal(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Draw from N(0, 1) with the key (seed, name): float32 on the CPU, whatever device trains."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)
