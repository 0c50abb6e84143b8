"""Runs a forward pass without side effects on the model."""

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let a forward pass modify copies of attributes and buffers, then restore the originals.

    Also restores each parameter's storage, gradient and `requires_grad`. Values that the pass
    writes to a parameter are restored by `Watch`.
    """
    spaces = [vars(module) for module in model.modules()]
    saved = [dict(space) for space in spaces]
    parameters = {p.untyped_storage() for p in model.parameters()}
    copies: dict[int, Any] = {}
    trained = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
    for parameter, *_ in trained:
        parameter.grad = None  # a backward pass would accumulate into it
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    fast_path, state = torch.backends.mha.get_fastpath_enabled(), random.getstate()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path runs a whole layer as one op
    fused = any(isinstance(module, nn.LSTM) for module in model.modules())  # by oneDNN
    onednn = torch.backends.mkldnn.set_flags(False if fused else None)[0]
    try:
        for space in spaces:
            space.update({k: copied(v, parameters, copies) for k, v in space.items()})
        with torch.random.fork_rng(devices), ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numbers)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.backends.mkldnn.set_flags(onednn)
        for parameter, data, gradient, flag in trained:
            storages = parameter.untyped_storage(), data.untyped_storage()
            if storages[0] is not storages[1] or parameter.shape != data.shape:
                parameter.data = data
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
            parameter.grad = gradient
        for space, attributes in zip(spaces, saved, strict=True):
            space.clear()
            space.update(attributes)


def copied(value: Any, parameters: Collection[Any], copies: dict[int, Any]) -> Any:
    """Return a deep copy of an attribute that a pass may write to.

    `copies` maps ids of originals to existing copies. Only arrays, random generators, built-in
    containers and tensors outside the storages in `parameters` are copied.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # fast path, because modules have many attributes
    if id(value) in copies:
        return copies[id(value)]
    own: Any = value
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.untyped_storage() not in parameters:
            own = value.detach().clone()
    elif isinstance(value, (random.Random, torch.Generator)) or package == "numpy":
        own = copy.deepcopy(value)
    elif isinstance(value, (dict, list, set)):
        own = value.copy() if type(value) is OrderedDict else copy.copy(value)
        copies[id(value)] = own  # before the members, because a container may contain itself
        if not isinstance(value, set):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in items:
                if (other := copied(each, parameters, copies)) is not each:
                    own[key] = other  # only set changed entries: some mappings are read-only
    elif type(value) is tuple:
        own = tuple(copied(each, parameters, copies) for each in value)
    copies[id(value)] = own
    return own
