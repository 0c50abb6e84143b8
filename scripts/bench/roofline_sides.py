"""The competitors of scripts/bench/roofline.py, each on the matrices of one rank's share.

They run where tensors of the device have no values. Other projects' optimizers are imported from
checkouts that the caller names; none of their code is here.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from scripts.bench.optimizer import fullest_share, with_rule
from scripts.bench.optimizer_sides import BETA, Ours, Share, Torch
from training.build import config_assignments, config_units
from training.config import Config
from training.rehearsal.scenario import PLAIN_STEP

Step = Callable[[], object]


def trace_ours(config: Config, ranks: int, rule: str, pc: bool) -> None:
    """Take two steps of our rule; the second is the one that counts."""
    assign = config_assignments(with_rule(config, rule, pc))
    side = Ours(share_of(config, ranks), assign, torch.device("cuda"))
    _take(side.step, side.prepare)


def trace_torch(config: Config, ranks: int, name: str) -> None:
    """Take two steps of `torch.optim.AdamW` (fused) on everything, or of its Muon with it."""
    side = Torch(share_of(config, ranks), torch.device("cuda"), muon=name == "muon")
    _take(side.step)


def trace_peer(config: Config, ranks: int, name: str, path: str) -> None:
    """Take two steps of an optimizer of `PEERS` on the matrices, elementwise weights left out."""
    sys.path.insert(0, path)
    shapes = [unit.shape for unit in share_of(config, ranks).matrices]
    parameters = list(_parameters(shapes))
    optimizer = PEERS[name](parameters)
    _take(optimizer.step)


def share_of(config: Config, ranks: int) -> Share:
    """Return the fullest rank's share of the config's units."""
    return fullest_share(config_units(config), config_assignments(config), ranks)


def _parameters(shapes: list[tuple[int, ...]]) -> Iterator[torch.nn.Parameter]:
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.empty(shape, device="cuda"))
        parameter.grad = torch.empty_like(parameter)
        yield parameter


def _take(step: Step, prepare: Step = lambda: None) -> None:
    """Call `step` twice, the second time as the optimizer's phase."""
    prepare()
    step()
    prepare()
    with torch.profiler.record_function("optimizer"):
        step()


def _dion(parameters: list[torch.nn.Parameter]) -> Any:
    from dion import Muon  # type: ignore[import-not-found]

    return Muon(parameters, lr=5e-3, mu=BETA, weight_decay=0.1, nesterov=True)


def _emerging(parameters: list[torch.nn.Parameter]) -> Any:
    from emerging_optimizers.orthogonalized_optimizers import (  # type: ignore[import-not-found]
        Muon,
    )

    return Muon(parameters, lr=5e-3, momentum=BETA, weight_decay=0.1, nesterov=True)


def _keller_jordan(parameters: list[torch.nn.Parameter]) -> Any:
    from muon import SingleDeviceMuon  # type: ignore[import-not-found]

    return SingleDeviceMuon(parameters, lr=5e-3, momentum=BETA, weight_decay=0.1)


def _public_sso(parameters: list[torch.nn.Parameter]) -> Any:
    from emerging_optimizers.orthogonalized_optimizers import SpectralBall

    return SpectralBall(parameters, lr=5e-3, momentum_beta=BETA, weight_decay=0.1)


PEERS: Final[dict[str, Callable[[list[torch.nn.Parameter]], Any]]] = {
    "dion": _dion,
    "emerging_optimizers": _emerging,
    "keller_jordan": _keller_jordan,
    "public_sso": _public_sso,
}
"""By name: Muon of microsoft/dion, of NVIDIA-NeMo/Emerging-Optimizers and of KellerJordan/Muon, and
SSO of Unakar/Megatron-LM (branch spectral_ball), with their defaults for everything that is not
given. Emerging-Optimizers is written for Python 3.12."""


def without_symmetric_kernels() -> None:
    """Ablate: all products by the library, both triangles computed."""
    from spectral.kernels import dispatch
    from training.rehearsal.replacement import replace

    def plain(entry: Any) -> Any:
        product = entry.operation in dispatch.OPERATIONS
        return dataclasses.replace(entry, tile=None) if product else entry

    table = {name: tuple(map(plain, each)) for name, each in dispatch.entries().items()}
    dispatch._lookup.cache_clear()
    replace(dispatch.entries, lambda: table)


def without_small_kernels() -> None:
    """Ablate: projected matrices and roots by the library's operations."""
    from spectral.kernels import dispatch
    from training.rehearsal.replacement import replace

    replace(dispatch.small_problem, lambda size, device: "taken away")


def without_batching() -> None:
    """Ablate: every matrix a stack of its own."""
    from parallel.optimizer import owned_stacks
    from training.rehearsal.replacement import replace

    together = owned_stacks.owned_stacks

    def alone(transfers: Any, assign: Any, device: Any) -> Any:
        return [stack for each in transfers for stack in together([each], assign, device)]

    replace(together, alone)
    without_joined_shapes()


def without_joined_shapes() -> None:
    """Ablate: every stack updated by itself."""
    from parallel.optimizer import owned_stacks
    from training.rehearsal.replacement import replace

    def apart(stacks: Any, device: Any) -> Any:
        return [[stack] for stack in stacks]

    replace(owned_stacks.joined_stacks, apart)


def without_cached_vectors() -> None:
    """Ablate: every singular pair from a cold start of two vectors, with the steps it takes."""
    from spectral import power_iteration
    from training.rehearsal.replacement import replace

    warm = power_iteration.top_pairs

    def cold(stacks: Any, cached: Any, *, steps: int, nearby: Any = None) -> Any:
        found = warm(stacks, torch.zeros_like(cached), steps=power_iteration.COLD_STEPS)
        return found._replace(nearby=nearby)

    replace(warm, cold)


def in_four_groups(config: Config, rule: str) -> Config:
    """Ablate: a step in four groups of buckets, whose stacks are smaller and more."""
    return _distributed(config, step_groups=4)


def in_graph(config: Config, rule: str) -> Config:
    """Record the step as one CUDA graph."""
    return _distributed(config, cuda_graph=True, overlap_gather=False)


def _distributed(config: Config, **changes: Any) -> Config:
    distributed = dataclasses.replace(config.optimizer.distributed, **changes)
    optimizer = dataclasses.replace(config.optimizer, distributed=distributed)
    return dataclasses.replace(config, optimizer=optimizer)


def _same(config: Config, rule: str) -> Config:
    return config


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One thing taken away from a step.

    rules    from whose steps it can be
    before   `module:function` that is called before the run is rehearsed
    changed  the config without it, of the config and the rule
    step     number of the step that counts
    """

    rules: tuple[str, ...]
    before: str | None = None
    changed: Callable[[Config, str], Config] = _same
    step: int = PLAIN_STEP


HERE: Final = "scripts.bench.roofline_sides"
ON_SPHERE: Final = ("muon_sphere", "spectral_sphere")
JOINED: Final = ("muon", *ON_SPHERE)
OF_MATRICES: Final = ("muon", *ON_SPHERE, "muon_plus_plus")
ABLATIONS: Final[dict[str, Ablation]] = {
    "batching": Ablation(OF_MATRICES, f"{HERE}:without_batching"),
    "joined shapes": Ablation(JOINED, f"{HERE}:without_joined_shapes"),
    "joined step groups": Ablation(OF_MATRICES, changed=in_four_groups),
    "symmetric kernels": Ablation(OF_MATRICES, f"{HERE}:without_symmetric_kernels"),
    "small kernels": Ablation(ON_SPHERE, f"{HERE}:without_small_kernels"),
    "cached vectors": Ablation(ON_SPHERE, f"{HERE}:without_cached_vectors"),
    # Recorded on the third step, replayed on the fourth.
    "launches by the host": Ablation(("adamw", *OF_MATRICES), changed=in_graph, step=4),
}
"""What can be taken away, by name."""
