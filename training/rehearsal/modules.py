"""Modules moved to a device whose tensors are of another kind than the host's."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

OWN = set(vars(FakeTensor)) | {
    "fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor",
    "nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo",
    "_nonzero_memo", "_item_memo", "_unique_memo", "_unique_consecutive_memo", "_nested_int_memo",
    "_nonzero_memo_vc", "_item_memo_vc", "_unique_memo_vc", "_unique_consecutive_memo_vc",
}  # fmt: skip
"""Attributes by which a fake tensor is what it is."""


def moved(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
    """`module.to(device)`, which cannot change a real parameter into a fake one in place.

    What is known of a parameter beside its values (how Megatron has cut it) stays with it.
    """
    device = torch.device(options.get("device", arguments[0] if arguments else "cuda"))
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.device.type != device.type:
                new = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                new.__dict__.update({k: v for k, v in vars(parameter).items() if k not in OWN})
                each._parameters[name] = new
        for name, buffer in list(each._buffers.items()):
            if buffer is not None and buffer.device.type != device.type:
                each._buffers[name] = buffer.to(device)
    return module
