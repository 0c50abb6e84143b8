"""Functions that the ranks run in the test of the Megatron adapter."""

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from parallel.comm import groups as process_groups
from tests.distributed.workers import start
from tests.models import tokens_of
from tests.paths import ROOT

BATCH, LENGTH, VOCAB = 8, 16, 64


def ten_steps(tensor: int) -> dict[str, Tensor]:
    """Train a GPT for ten steps with SSO through the adapter, and return its whole weights."""
    sys.modules["spectrain"] = importlib.import_module("spectral")
    sys.path.insert(0, str(ROOT / "examples" / "adapters"))
    adapter = importlib.import_module("megatron_registry")
    groups = start({"tensor": tensor})
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, attention_softmax_in_fp32=False,
        params_dtype=torch.float64,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH, parallel_output=False)
    model.double()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(
            part(whole(number, name, parameter, tensor), name, parameter, rank, tensor)
        )
    named = dict(model.named_parameters())
    matrices = [
        p
        for n, p in named.items()
        if n.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"))
    ]
    others = [p for p in named.values() if all(p is not m for m in matrices)]
    collection = ProcessGroupCollection.use_mpu_process_groups()
    arguments: Any = type("Config", (), {"lr": 1e-2, "weight_decay": 0.1})
    optimizer = adapter.build(
        adapter.KINDS["sso"],
        [{"params": matrices}],
        **adapter.settings(arguments, [model], collection),
    )
    adam = torch.optim.AdamW(others, lr=1e-3)
    tokens, labels = (
        x.chunk(groups.data.size)[groups.data.rank] for x in tokens_of(BATCH, LENGTH, VOCAB)
    )
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    for _ in range(10):
        logits = model(tokens, positions, mask)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        for parameter in named.values():
            dist.all_reduce(parameter.grad, group=groups.data.group)
            parameter.grad /= groups.data.size
        for each in (optimizer, adam):
            each.step()
            each.zero_grad()
    found = {name: gathered(name, parameter, tensor) for name, parameter in named.items()}
    process_groups.shutdown()
    return found


def axis_of(parameter: Tensor) -> int | None:
    """Return the axis along which a parameter is split across ranks, or None."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def whole(number: int, name: str, parameter: Tensor, size: int) -> Tensor:
    """Return the initial value of a whole parameter."""
    shape, axis = list(parameter.shape), axis_of(parameter)
    if axis is not None:
        shape[axis] *= size
    generator = torch.Generator().manual_seed(number)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 0.1 * value if value.ndim > 1 else torch.ones_like(value)


def part(value: Tensor, name: str, parameter: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of a parameter. For a gated layer, this is a part of each half."""
    axis = axis_of(parameter)
    if axis is None:
        return value
    halves = value.chunk(2) if name.endswith("fc1.weight") else [value]
    return torch.cat([half.chunk(size, axis)[rank] for half in halves])


def gathered(name: str, parameter: Tensor, size: int) -> Tensor:
    """Gather the whole parameter from all ranks."""
    axis, own = axis_of(parameter), parameter.detach()
    if axis is None or size == 1:
        return own.clone()
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if not name.endswith("fc1.weight"):
        return torch.cat(parts, axis)
    return torch.cat([torch.cat([p.chunk(2)[half] for p in parts]) for half in range(2)])
