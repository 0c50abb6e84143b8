"""Megatron-core's own layer-wise distributed Muon, for comparison.

Its `DistributedDataParallel` holds gradients and weights in shards that each have whole matrices,
its `LayerWiseDistributedOptimizer` steps the matrices of this rank with Muon, and its
`DistributedOptimizer` the shards of everything else with Adam. It steps one parameter at a time,
after splitting q, k and v; its gates and ups are one matrix. Muon's numbers are those of the
config, so the weights are ours where the units are (`optimizer.units.qkv=component`,
`optimizer.units.split_gate_up=false`).
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.engine import engine_version
from parallel.comm.collectives import CommVolume
from parallel.comm.cpu import schedule_devices
from parallel.model import ParallelModel
from parallel.optimizer.routing import Assign, Assignment
from scripts.bench.distributed_baselines import total_bytes
from spectral.rules.adamw import AdamWRule
from spectral.rules.muon import MuonRule

PARTS: Final = (
    "megatron.core.optimizer.layer_wise_optimizer.tag_params_for_buffer_routing",
    "emerging_optimizers.orthogonalized_optimizers",
)
"""What must be installed, by the engine and beside it."""

SCALES: Final = {"spectral_mup": "unit_rms_norm", "spectral_kaiming": "shape_scaling"}
"""The engine's name of each scale of Muon's update; Adam's RMS has a factor of its own."""


def why_absent(
    assigned: Sequence[Assignment], dtype: torch.dtype, parts: Sequence[str] = PARTS
) -> str | None:
    """Return why the peer cannot be measured with these assignments, None if it can."""
    for part in parts:
        module, _, name = part.rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            return f"megatron-core {engine_version()} is installed without {part}"
    if any(each.group == "matrix" and type(each.rule) is not MuonRule for each in assigned):
        return "it has Muon for matrices, the config another rule"
    if any(each.group != "matrix" and type(each.rule) is not AdamWRule for each in assigned):
        return "it has Adam beside Muon, the config another rule"
    if dtype is not torch.bfloat16:
        return "it keeps masters of bfloat16 weights alone: train.precision=bf16"
    return None


class MegatronLayerWise:
    """The optimizer of megatron-core as a scheme; see `distributed.Scheme`."""

    def __init__(self, model: ParallelModel, assign: Assign) -> None:
        """Take over the model's parameters: they move to buffers of the engine."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer.layer_wise_optimizer import (
            LayerWiseDistributedOptimizer,
            tag_params_for_buffer_routing,
        )

        (domain,) = model.domains
        self.ranks = domain.domain.replicas.size
        self.comm_volume = CommVolume()
        self.counted = False
        (chunk,) = model.chunks
        tag_params_for_buffer_routing([chunk])
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()), None, self.ranks, settings
        )
        assigned = {unit.parameter: assign(unit) for unit in model.units}
        with schedule_devices(), CudaTypeNames():
            self.ddp = DistributedDataParallel(
                model.config, settings, chunk, full_param_layout=layout
            )
            self.optimizer = get_megatron_optimizer(
                optimizer_config(assigned.values()),
                [self.ddp],
                config_overrides=overrides(model.parameters, assigned),
            )
        for group in self.optimizer.param_groups:  # what the engine's scheduler does each step
            group["lr"] = group["max_lr"]
            group["weight_decay"] = group["wd_mult"]
        self.parameters = {name: p.detach() for name, p in model.parameters.items()}
        self.gradients = {name: vars(p)["main_grad"] for name, p in model.parameters.items()}

    def update(self) -> None:
        """Reduce-scatter, step, all-gather; the first time counting the bytes."""
        if self.counted:
            return self.reduce_and_step()
        self.counted = True
        with CollectiveBytes(self.comm_volume, self.ranks):
            self.reduce_and_step()

    def reduce_and_step(self) -> None:
        """Go from complete local gradients to new weights on every rank."""
        self.ddp.finish_grad_sync()
        self.optimizer.prepare_grads()
        self.optimizer.step_with_ready_grads()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps, padding included."""
        buffers = self.ddp.buffers
        weights = {p.untyped_storage()._cdata for p in self.parameters.values()}
        kept = {}
        for inner in inner_optimizers(self.optimizer):
            groups = [group["params"] for group in inner.param_groups]
            for tensor in tree_leaves((groups, list(inner.state.values()))):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    kept[storage._cdata] = storage.nbytes()
        return {
            "weights": total_bytes(buffer.param_data for buffer in buffers),
            "gradients": total_bytes(buffer.grad_data for buffer in buffers),
            "masters and state": sum(n for key, n in kept.items() if key not in weights),
        }


def optimizer_config(assigned: Any) -> Any:
    """Return the engine's settings of the config's Muon and AdamW."""
    from megatron.core.optimizer import OptimizerConfig

    muon = next(each.rule for each in assigned if isinstance(each.rule, MuonRule))
    adam = next(each.rule for each in assigned if isinstance(each.rule, AdamWRule))
    return OptimizerConfig(
        optimizer="muon",
        use_layer_wise_distributed_optimizer=True,
        bf16=True,
        lr=1.0,
        min_lr=0.0,
        weight_decay=1.0,
        clip_grad=0.0,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.epsilon,
        muon_momentum=muon.momentum,
        muon_nesterov=muon.nesterov,
        muon_num_ns_steps=muon.steps,
        muon_coefficient_type=muon.schedule,
        muon_scale_mode=SCALES.get(muon.scale, "spectral"),
        muon_extra_scale_factor=muon.scale_factor * (0.2 if muon.scale not in SCALES else 1.0),
        muon_fp32_matmul_prec="medium" if muon.msign_dtype == "bfloat16" else "highest",
    )


def overrides(
    parameters: Mapping[str, torch.nn.Parameter], assigned: Mapping[str, Assignment]
) -> dict[Any, Any]:
    """Return rates per parameter in the engine's form, as multiples of one."""
    from megatron.core.optimizer import ParamGroupOverride, ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    members: dict[tuple[float, float], set[int]] = {}
    for name, parameter in parameters.items():
        rates = (assigned[name].lr, assigned[name].weight_decay)
        members.setdefault(rates, set()).add(id(parameter))
    return {
        ParamKey(
            predicate=ParamPredicate(
                name=f"lr {lr} decay {decay}", fn=lambda p, chosen=chosen: id(p) in chosen
            )
        ): ParamGroupOverride(max_lr=lr, wd_mult=decay)
        for (lr, decay), chosen in members.items()
    }


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers of PyTorch's kind that the engine's wrap and chain."""
    chained = vars(optimizer).get("chained_optimizers")
    if chained is None:
        yield optimizer.optimizer
        return
    for each in chained:
        yield from inner_optimizers(each)


class CudaTypeNames(TorchFunctionMode):
    """Lets tensors of this host say that they are CUDA's, which the engine asks of its masters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is Tensor.type and isinstance(found, str):
            return found.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
        return found


class CollectiveBytes(TorchDispatchMode):
    """Counts what the collectives of another's code send, as a ring of `ranks` would."""

    KINDS: Final = {
        "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
        "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 1),
        "_allgather_base_": ("all-gather", 0, 1),
        "allgather_into_tensor_coalesced_": ("all-gather", 0, 1),
        "allreduce_": ("all-reduce", 0, 2),
    }
    """By operation: its kind, the place of its whole tensors, and how often a ring passes them."""

    def __init__(self, comm_volume: CommVolume, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm_volume = comm_volume
        self.ranks = ranks

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            kind, place, passes = self.KINDS[function._schema.name.removeprefix("c10d::")]
            whole = total_bytes(x for x in tree_leaves(arguments[place]) if isinstance(x, Tensor))
            self.comm_volume.add(kind, passes * whole * (self.ranks - 1) / self.ranks)
        return function(*arguments, **(options or {}))
