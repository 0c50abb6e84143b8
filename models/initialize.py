"""Weight initialisation. Weights do not depend on the layout, because each unit's random generator
is seeded by the unit's name."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from models.config import InitConfig
from models.units import Unit
from spectral.batching import grouped
from spectral.singular_triplets import cold_start
from spectral.sphere import radius

RESIDUAL_OUTPUTS = ("o", "down", "shared_down", "expert_down")
UPS = ("up", "shared_up", "expert_up")
VOCABULARY = ("embedding", "head")
STACK = 2**26
"""Maximum number of matrix elements per batch when computing spectral norms: half a GiB in
float64."""
THREADS = 8
"""Maximum number of units that a rank initializes in parallel."""

Compute = Callable[[Sequence[Unit]], Tensor]
"""Function that computes one number per unit."""


def initialize_(
    parameters: Mapping[str, Tensor],
    units: Sequence[Unit],
    init: InitConfig,
    *,
    seed: int,
    layers: int,
    tensor: tuple[int, int] = (0, 1),
    given: Callable[[Unit], Tensor] | None = None,
    together: Callable[[Sequence[Unit], Compute], Tensor] = lambda units, compute: compute(units),
) -> None:
    """Initialise every unit of `parameters` in place.

    `given(unit)` returns the value `[*shape]` of a whole unit. Without `given`, matrices are drawn
    from N(0, std^2), and other units are set to their `start`. With `init.spectral`, every matrix
    except the embedding and the head is then rescaled to the spectral norm that `init.radius` and
    `init.radius_scaler` define ("Controlled LLM Training on Spectral Sphere", section 4). Sharded
    units are drawn and rescaled as whole units, so the model does not depend on the tensor-parallel
    size.

    `tensor` is a pair: this rank's index among the ranks that share a unit, and the number of such
    ranks. `together(units, compute)` returns `compute(units)`, float64 `[units]`, and may split the
    work across ranks that hold the same units.
    """
    some = next(iter(parameters.values()))
    with torch.no_grad():
        spheres = [u for u in units if u.is_matrix and init.spectral and u.role not in VOCABULARY]
        factors: dict[str, Tensor] = {}
        if given is None and spheres:
            norms = partial(spectral_norms, init=init, seed=seed, layers=layers, device=some.device)
            drawn = together(spheres, norms)
            goals = [radius(u.shape, init.radius, init.radius_scaler) for u in spheres]
            scaled = torch.tensor(goals, dtype=drawn.dtype, device=drawn.device) / drawn
            factors = {u.name: factor for u, factor in zip(spheres, scaled.float(), strict=True)}
        whole_units = draws([u for u in units if u.is_matrix], init, seed=seed, layers=layers)
        for unit in units:
            target = unit.view(parameters[unit.parameter])
            if given is not None:
                target.copy_(unit.piece(given(unit), *tensor))
                continue
            if not unit.is_matrix:
                target.fill_(unit.start)
                continue
            whole = next(whole_units)
            if unit.name in factors:
                whole = whole.to(target.device) * factors[unit.name]
            target.copy_(unit.piece(whole, *tensor))


def spectral_norms(
    units: Sequence[Unit], init: InitConfig, *, seed: int, layers: int, device: torch.device
) -> Tensor:
    """Return the spectral norms `[units]` of the drawn matrices, float64 on `device`, accurate to
    about 1e-9. Matrices of the same shape are batched, with up to `STACK` elements per batch."""
    norms = torch.zeros(len(units), dtype=torch.float64, device=device)
    by_shape = grouped(range(len(units)), lambda i: units[i].shape)
    for (rows, cols), members in by_shape.items():
        count = max(1, STACK // (rows * cols))
        for first in range(0, len(members), count):
            some = members[first : first + count]
            drawn = draws([units[i] for i in some], init, seed=seed, layers=layers)
            whole = torch.stack(list(drawn)).to(device).double()
            norms[torch.tensor(some, device=device)], _, _ = cold_start(whole)
    return norms


def draws(units: Sequence[Unit], init: InitConfig, *, seed: int, layers: int) -> Iterator[Tensor]:
    """Yield `draw(unit)` for all units, using several threads if each rank has several processors.

    A single thread takes a minute for 8B parameters.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = max(1, min(THREADS, (os.cpu_count() or 1) // ranks))
    with ThreadPoolExecutor(count) as threads:
        for first in range(0, len(units), count):
            some = units[first : first + count]
            yield from threads.map(partial(draw, init=init, seed=seed, layers=layers), some)


def draw(unit: Unit, init: InitConfig, *, seed: int, layers: int) -> Tensor:
    """Draw a whole unit `[rows, cols]` from its normal distribution, in float32 on CPU."""
    rows, cols = unit.shape
    whole = torch.empty(rows, cols)
    parts = whole.split([rows for _, rows in unit.draws])
    for (name, _), part in zip(unit.draws, parts, strict=True):
        normal_(part, name, seed, standard_deviation(unit, name, init, layers))
    return whole


def standard_deviation(unit: Unit, drawn: str, init: InitConfig, layers: int) -> float:
    """Return the standard deviation of the random draw named `drawn`, one of the draws that
    initialise `unit`."""
    if unit.role in VOCABULARY:
        return init.embedding_std if unit.role == "embedding" else init.head_std
    if init.std is None:
        rows, cols = unit.shape
        return min(1.0, math.sqrt(rows / cols)) / math.sqrt(cols)
    if not init.depth_scaled:
        return init.std
    if init.depth_scaling == "layers":
        return init.std / (math.sqrt(2 * layers) if unit.role in RESIDUAL_OUTPUTS else 1.0)
    # Gate and up are drawn separately even if they form one unit.
    residual = unit.role in (*RESIDUAL_OUTPUTS, *UPS) or drawn.endswith(".up")
    layer = unit.layer
    return init.std / (math.sqrt(2 * (layer + 1)) if residual and layer is not None else 1.0)


def normal_(part: Tensor, name: str, seed: int, deviation: float = 1.0) -> Tensor:
    """Fill `part`, a float32 tensor on CPU, from N(0, deviation^2) and return it. The
    random number generator is seeded with `seed` and `name`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return part.normal_(0.0, deviation, generator=generator)
