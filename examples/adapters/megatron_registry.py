"""Megatron-LM adapter: adds `--optimizer sso`, `muon_sphere` and `muon_plus_plus`.

    from megatron_registry import register

    register()  # in pretrain_gpt.py, before `pretrain(...)`

Requires megatron-core 0.19, whose optimizer registry it extends, and emerging-optimizers, without
which Megatron ignores the registry. Each head of q, k and v (in multi-latent attention too) and
each half of a gated layer is a separate matrix. Embeddings, output heads and gains are stepped by
Megatron's Adam. Pipeline and data parallelism work unchanged. Under tensor parallelism, each matrix
is stepped as a whole on one rank. Routed experts, Mamba layers and gated delta networks are not
supported. Optimizer state is not saved in checkpoints: set `--no-save-optim`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from spectrain import MuonPlusPlus, MuonSphere, SpectralOptimizer, SpectralSphere

KINDS: dict[str, type[SpectralOptimizer]] = {
    "sso": SpectralSphere,
    "muon_sphere": MuonSphere,
    "muon_plus_plus": MuonPlusPlus,
}


def register() -> None:
    """Add `KINDS` to megatron-core's optimizer registry."""
    from megatron.core.optimizer import emerging_optimizers

    for name, kind in KINDS.items():
        emerging_optimizers._EMERGING_OPTIMIZERS[name] = emerging_optimizers.EmergingOptimizerEntry(
            optimizer_cls=partial(build, kind),
            init_state_fn=lambda optimizer, config=None: None,  # optimizers create their own state
            config_to_kwargs=settings,
        )


def settings(
    config: Any, model_chunks: Sequence[torch.nn.Module], pg_collection: Any
) -> dict[str, Any]:
    """Return the keyword arguments for `build`, taken from Megatron's config."""
    options = {"model_chunks": model_chunks, "lr": config.lr, "weight_decay": config.weight_decay}
    if pg_collection is not None and pg_collection.tp.size() > 1:
        options["groups_of_ranks"] = (pg_collection.dp_cp, pg_collection.tp)
    return options


def build(
    kind: type[SpectralOptimizer],
    groups: Iterable[dict[str, Any]],
    *,
    model_chunks: Sequence[torch.nn.Module],
    lr: float,
    weight_decay: float,
    groups_of_ranks: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
) -> torch.optim.Optimizer:
    """Create an optimizer from Megatron's parameter groups, dividing weights into matrices.

    The optimizer silently skips steps with nonfinite gradients, because Megatron does its own
    checks. `groups_of_ranks` are the data-parallel and tensor-parallel process groups, or None
    without tensor parallelism.
    """
    named = {
        parameter: (name, chunk)
        for chunk in model_chunks
        for name, parameter in chunk.named_parameters()
    }
    divided = []
    for group in groups:
        alike: dict[Layout, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            alike.setdefault(layout_of(parameter, *named[parameter]), []).append(parameter)
        for layout, params in alike.items():
            units = {"rows": [*layout.rows]}
            divided.append({**group, "params": params, "units": units, "gated": layout.gated})
    if groups_of_ranks is not None:
        return TensorParallel(kind, divided, groups_of_ranks, lr=lr, weight_decay=weight_decay)
    return kind(divided, lr=lr, weight_decay=weight_decay, nonfinite="skip")


class TensorParallel(torch.optim.Optimizer):
    """Optimizer for weights that are sharded by Megatron's tensor parallelism.

    Megatron sets learning rates and gradients on the groups and parameters of this optimizer, and
    may replace the parameters with master weights. The inner optimizer is created at the first step
    with DTensors that share memory with the parameters.
    """

    def __init__(
        self,
        kind: type[SpectralOptimizer],
        groups: list[dict[str, Any]],
        groups_of_ranks: tuple[dist.ProcessGroup, dist.ProcessGroup],
        **defaults: Any,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        super().__init__(groups, defaults)
        self.kind = kind
        data, tensor = groups_of_ranks
        columns = torch.arange(tensor.size()) - tensor.rank()
        ranks = torch.tensor(dist.get_process_group_ranks(data))[:, None] + columns
        device = self.param_groups[0]["params"][0].device.type
        self.mesh = DeviceMesh.from_group(
            [data, tensor], device, mesh=ranks, mesh_dim_names=("data", "tensor")
        )
        self.inner: SpectralOptimizer | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every weight that has a gradient. Must be called on every rank of the stage."""
        if self.inner is None:
            own = [
                {**group, **self._divided(group, lambda p: p.detach())}
                for group in self.param_groups
            ]
            self.inner = self.kind(own, **self.defaults, nonfinite="skip")
        for group, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            own |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            gradients = self._divided(group, lambda p: p.grad)["params"]
            for part, gradient in zip(own["params"], gradients, strict=True):
                part.grad = gradient
        self.inner.step()
        self.inner.zero_grad()  # free the DTensors' references to the gradients

    def _divided(
        self, group: dict[str, Any], select: Callable[[torch.Tensor], Any]
    ) -> dict[str, Any]:
        """Apply `select` to the parameters of a group. Return the results as DTensors, with gated
        layers split into halves, and the `units` of these tensors."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        tensors, halves = [], group["gated"]
        for parameter in group["params"]:
            cut = getattr(parameter, "tensor_model_parallel", False)
            placement = Shard(parameter.partition_dim) if cut else Replicate()
            value = select(parameter)
            if value is None:  # no gradient
                tensors += [None] * (1 + halves)
                continue
            for part in value.chunk(1 + halves):
                tensors.append(DTensor.from_local(part, self.mesh, [Replicate(), placement]))
        return {"params": tensors, "units": {} if halves else group["units"]}


class Layout(NamedTuple):
    """The matrices in a weight: their row counts, which repeat (none for a single matrix), and
    whether they are the halves of a gated layer."""

    rows: tuple[int, ...] = ()
    gated: bool = False


def layout_of(parameter: torch.Tensor, name: str, chunk: torch.nn.Module) -> Layout:
    """Return the matrices in a weight.

    Raises ValueError for routed experts and other weights that are not supported.
    """
    if ".experts." in name or not getattr(parameter, "allreduce", True):
        raise ValueError(f"routed experts are not supported, got {name}")
    if name.endswith("in_proj.weight"):
        raise ValueError(f"Mamba and gated delta networks are not supported, got {name}")
    config: Any = next(module.config for module in chunk.modules() if hasattr(module, "config"))
    match name.removesuffix(".weight").rpartition(".")[2]:
        case "linear_fc1" if config.gated_linear_unit:
            return Layout((parameter.shape[0] // 2,), gated=True)
        case "linear_qkv" | "linear_q" | "linear_kv":
            return Layout((config.kv_channels,))
        case "linear_q_proj" | "linear_q_up_proj":  # this and the next: multi-latent attention
            return Layout((config.qk_head_dim + config.qk_pos_emb_head_dim,))
        case "linear_kv_up_proj":
            return Layout((config.qk_head_dim, config.v_head_dim))
        case "linear_kv_down_proj":
            return Layout((config.kv_lora_rank, config.qk_pos_emb_head_dim))
    return Layout()
