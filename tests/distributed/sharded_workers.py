"""Functions that the ranks run in the tests of sharded parameters: a small model under FSDP2 and
other kinds of sharding."""

import copy
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from spectral import SpectralOptimizer, clip_qk_, merge_, preconditioned, split_parameters
from spectral.local_part import local_of
from spectral.polar import WORKSPACE_ELEMENTS
from spectral.rules import RULES, MomentumRule, Report, Stack
from spectral.rules.base import Rule
from spectral.sharded import shared_matrices

HIDDEN, INNER, HEADS = 12, 20, 3  # two ranks cut through the head in the middle
ROWS = 5  # four ranks share this matrix unevenly: one has no part
TOKENS = 10
BLOCKS = ["q_proj", "o_proj", "up", "down"]
"""Blocks with PC layers, if any."""
UNITS = {
    "*.up.*weight*": {"stride": 2, "rows": [3, 2]},
    "*.down.*weight*": {"groups": 2, "transposed": True},
}
"""Divisions into matrices of every other row, and into matrices that are parts of both axes."""
HALF, STEPS = 2, 3


class Attention(nn.Module):
    """The projections of attention heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(torch.tanh(self.q_proj(x) * self.k_proj(x)) + self.v_proj(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.narrow = nn.Linear(HIDDEN, ROWS, bias=False)
        self.lm_head = nn.Linear(ROWS, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.lm_head(self.narrow(x))
        return out


PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "attention.o_proj": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def build(how: str, pc: bool = False, blocks: int = 1) -> nn.Module:
    """Build a float64 model with seed 0, optionally with PC layers, sharded as `how` specifies."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(blocks).double()
    if pc and not how.startswith("tp"):
        preconditioned(model, blocks=BLOCKS)
    world = dist.get_world_size()
    match how:
        case "one":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp":
            return sharded(model, init_device_mesh("cpu", (world,)))
        case "hsdp":
            names = ("copies", "shards")
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
            return sharded(model, mesh)
    names = ("data", "tensor")
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names)
    narrow = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {"narrow": narrow})
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    if pc:
        preconditioned(model, blocks=BLOCKS)
    return sharded(model, mesh["data"]) if how == "tp_fsdp" else model


def sharded(model: Model, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_turn(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Call functions of this module one after the other with keyword arguments, and return their
    results."""
    return [globals()[name](**arguments) for name, arguments in calls]


def optimizer_of(
    model: nn.Module, rule: str, units: dict[str, Any] = UNITS, **options: Any
) -> SpectralOptimizer:
    if rule == "adamw":
        return SpectralOptimizer(model.parameters(), rule="adamw", lr=1e-2, **options)
    rule, _, how = rule.partition(" ")
    if how == "cautious":
        options["cautious_decay"] = True
    split: Any = split_parameters(model, units=units, lr=1e-2)
    if how == "rates":
        split = [own for group in split for own in rated(group)]
    return SpectralOptimizer(split, rule=rule, lr=2e-2, **options)


def rated(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a group into one group per parameter, with different learning rates and weight
    decays."""
    group = {"lr": 2e-2, "weight_decay": 0.1, **group}
    own = []
    for i, pair in enumerate(group["params"]):
        lr, decay = group["lr"] * (1 + i % 3), group["weight_decay"] * (1 + i % 2)
        own.append({**group, "params": [pair], "lr": lr, "weight_decay": decay})
    return own


def train(model: nn.Module, optimizer: SpectralOptimizer, how: str, first: int, last: int) -> None:
    """Train on this rank's part of the batch. Tensor-parallel ranks train on the same part."""
    ways = dist.get_world_size() if how != "one" else 1
    rank = dist.get_rank() if how != "one" else 0
    if how.startswith("tp"):
        ways, rank = ways // 2, rank // 2
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(TOKENS, (8, 6), generator=generator).chunk(ways)[rank]
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all whole weights by name."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found[name.removeprefix("module.")] = full.clone()
    return found


def counted(rule: str) -> Counter[tuple[int, ...]]:
    """Return a counter, by shape, of the matrices that this rank steps from now on. It stays empty
    for elementwise rules."""
    seen: Counter[tuple[int, ...]] = Counter()
    kind = RULES[rule]
    if not kind.whole_matrix:
        return seen
    original = kind.update

    def update(self: Rule, stacks: Sequence[Stack]) -> list[Report]:
        for stack in stacks:
            seen[tuple(stack.weight.shape[1:])] += len(stack.weight)
        return original(self, stacks)

    kind.update = update  # type: ignore[method-assign]
    return seen


def curves(cases: list[tuple[str, list[str], bool]]) -> list[dict[str, Any]]:
    """For each (how, rules, PC layers) and rule, return the weights after three steps, and the
    matrices that this rank steps in the last step.

    Matrices are exchanged in two step groups. The workspace holds one square matrix.
    """
    shared_matrices.STEP_GROUP_NUMEL = 700
    WORKSPACE_ELEMENTS["cpu"] = 150
    found: list[dict[str, Any]] = []
    for how, rules, pc in cases:
        found.append({})
        for rule in rules:
            model = build(how, pc)
            optimizer = optimizer_of(model, rule)
            train(model, optimizer, how, 0, STEPS - 1)
            seen = counted(rule.split()[0])
            train(model, optimizer, how, STEPS - 1, STEPS)
            stepped = [[*shape, n] for shape, n in sorted(seen.items())]
            found[-1][rule] = {"weights": whole(model), "stepped": stepped}
    return found


def save(how: str, rules: list[str], folder: str) -> None:
    """Train `HALF` steps with each rule, and save with torch.distributed.checkpoint to
    FOLDER/RULE."""
    for rule in rules:
        model = build(how)
        optimizer = optimizer_of(model, rule)
        train(model, optimizer, how, 0, HALF)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{rule}")


def resume(how: str, rules: list[str], folder: str) -> list[dict[str, Tensor]]:
    """Return the weights after further steps from each checkpoint."""
    found = []
    for rule in rules:
        model = build(how)
        optimizer = optimizer_of(model, rule)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{rule}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        train(model, optimizer, how, HALF, STEPS)
        found.append(whole(model))
    return found


def placed_gradients() -> list[str]:
    """Return all placements of a parameter and its gradient for which a step on two ranks differs
    from a step on plain tensors."""
    build("one")
    mesh, different = init_device_mesh("cpu", (2,)), []
    weight, gradient = torch.randn(2, 6, 4, dtype=torch.float64)
    kept = (Shard(0), Shard(1), Replicate())
    for rule, own, given in product(("adamw", "muon"), kept, (*kept, Partial())):
        steps = []
        for cut in (False, True):
            parameter = nn.Parameter(
                distribute_tensor(weight, mesh, [own]) if cut else weight.clone()
            )
            parameter.grad = gradient
            if cut and given == Partial():
                part = gradient * (0.25 + 0.5 * dist.get_rank())
                parameter.grad = DTensor.from_local(part, mesh, [given])
            elif cut:
                parameter.grad = distribute_tensor(gradient, mesh, [given])
            SpectralOptimizer([parameter], rule=rule, lr=0.1).step()
            steps.append(parameter.full_tensor() if cut else parameter.detach())
        if not torch.allclose(*steps, rtol=0, atol=1e-12):
            different.append(f"{rule}, {own}, {given}")
    return different


def refusals() -> list[str]:
    """Return the errors for incorrect use on two ranks."""
    build("one")
    said = []

    def attempt(*parameters: Any) -> None:
        said.append(error_of(partial(SpectralOptimizer, parameters, rule="muon")))

    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    matrix = torch.ones(4, 4)
    attempt(*(nn.Parameter(distribute_tensor(matrix, mesh)) for mesh in (line, square)))
    attempt(nn.Parameter(DTensor.from_local(matrix, line, [Partial()], run_check=False)))
    attempt(nn.Parameter(distribute_tensor(torch.ones(4), line)))
    for nonfinite in ("raise", "skip"):
        model = build("fsdp")
        optimizer = optimizer_of(model, "muon", nonfinite=nonfinite)
        train(model, optimizer, "fsdp", 0, 1)
        for missing in ([next(model.parameters())], [*model.parameters()]):  # one, and then all
            for parameter in missing if dist.get_rank() == 0 else ():
                parameter.grad = None
            said.append(error_of(optimizer.step))
    model = build("fsdp")
    optimizer = optimizer_of(model, "muon")
    train(model, optimizer, "fsdp", 0, 1)
    grad = local_of(model.get_parameter("blocks.0.down.weight").grad)
    if dist.get_rank() == 1:
        grad.view(-1)[0] = torch.nan
    said.append(error_of(optimizer.step))
    alone = build("one")  # without DDP, nothing averages the gradients
    replicas = optimizer_of(alone, "muon", replicas=dist.group.WORLD, nonfinite="skip")
    for parameter in alone.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    replicas.step()  # skipped, so the next step compares the gradients
    said.append(error_of(partial(train, alone, replicas, "ddp", 0, 1)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(alone, optimizer_of(alone, "muon"), "one", 0, 1)
    said.append(" ".join(str(each.message) for each in warned))
    return said


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises, or "" without an error."""
    try:
        call()
    except (FloatingPointError, ValueError) as error:
        return str(error)
    return ""


def restarted(folder: str) -> list[bool]:
    """Return whether a step is the same after the process group has been destroyed and created
    again."""
    found = []
    for how in ("fsdp", "hsdp"):
        weights = []
        for attempt in range(2):
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/{how}{attempt}", int(os.environ["WORLD_SIZE"]))
            dist.init_process_group(
                "gloo",
                store=store,
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
            model = build(how)
            train(model, optimizer_of(model, "muon"), how, 0, 1)
            weights.append(whole(model))
        found.append(all(map(torch.equal, weights[0].values(), weights[1].values())))
    return found


def unfit(how: str, rules: list[str]) -> list[list[str]]:
    """For each rule, return this rank's errors for a NaN in rank 1's part of a loaded state, and
    for a step with a weight that has been cut and has no gradient, followed by the names of all
    other weights that have changed."""
    found = []
    for rule in rules:
        model = build(how)
        optimizer = optimizer_of(model, rule)
        train(model, optimizer, how, 0, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == 1:
            local_of(saved["state"][1]["momentum"]).view(-1)[-1] = torch.nan
        cut = dict(model.named_parameters())["blocks.0.attention.o_proj.weight"]
        whole_cut = cut.full_tensor()[: HIDDEN - 4].detach()
        before, said = whole(model), []
        for attempt in (partial(optimizer.load_state_dict, saved), optimizer.step):
            said.append(error_of(attempt))
            cut.data = distribute_tensor(whole_cut, cut.device_mesh, cut.placements)
            cut.grad = None
        before.pop("blocks.0.attention.o_proj.weight")
        after = whole(model)
        said += [name for name, value in before.items() if not torch.equal(value, after[name])]
        found.append(said)
    return found


def merged(how: str) -> list[Any]:
    """Merge PC layers, and return the largest change of the logits, or the errors under FSDP."""
    model = build(how, pc=True)
    if how == "fsdp":
        convert = partial(preconditioned, build(how), blocks=BLOCKS)
        return [error_of(partial(merge_, model)), error_of(convert)]
    tokens = torch.arange(12).view(2, 6) % TOKENS
    before = model(tokens).detach()
    merge_(model)
    left = [name for name, _ in model.named_parameters() if "original" in name or "gamma" in name]
    return [left, float((model(tokens).detach() - before).abs().max())]


def rounded(rules: list[str]) -> list[list[float]]:
    """For exchanges in bfloat16 under each rule, return the relative error of the change in the
    weights over ten steps, the bytes sent, and whether mean squares are unchanged."""
    return [rounded_by(rule) for rule in rules]


def rounded_by(rule: str) -> list[float]:
    """Return the result of `rounded` for one rule."""
    start, runs = whole(build("fsdp", blocks=2)), []
    for dtype in (None, torch.bfloat16):
        model = build("fsdp", blocks=2)
        optimizer = optimizer_of(model, rule, units={}, exchange_dtype=dtype)
        train(model, optimizer, "fsdp", 0, 1)
        before = optimizer.sent_bytes
        train(model, optimizer, "fsdp", 1, 2)
        bytes_sent = torch.tensor(optimizer.sent_bytes - before)
        dist.all_reduce(bytes_sent)
        if rule == "muon":  # sends the parts that are not at their owner, and the updates back
            matrices = optimizer._matrices
            assert matrices is not None and matrices.placement.moved > 0
            width = 8 if dtype is None else 2
            assert bytes_sent == 2 * matrices.placement.moved * width
        train(model, optimizer, "fsdp", 2, 10)
        runs.append((whole(model), int(bytes_sent)))
    (exact, many), (near, few) = runs
    name = "blocks.0.down.weight"
    moved = (exact[name] - start[name]).norm()
    squares = [state["square"] for state in optimizer.state.values() if "square" in state]
    rounds = [torch.equal(x.bfloat16().to(x.dtype), x) for x in map(local_of, squares)]
    kept = not any(rounds) or rule != "normuon"
    return [float((near[name] - exact[name]).norm() / moved), few / many, kept]


def clipped() -> list[bool]:
    """Return whether `clip_qk_` scales weights sharded by rows or by columns like whole weights."""
    mesh = init_device_mesh("cpu", (2,))
    logits = torch.tensor([300.0, 1.0, 150.0, 1.0], dtype=torch.float64)
    found = []
    for dim in (0, 1):
        query, key = torch.ones(8, 6, dtype=torch.float64), torch.ones(4, 6, dtype=torch.float64)
        cut = [distribute_tensor(weight, mesh, [Shard(dim)]) for weight in (query, key)]
        clip_qk_(*cut, logits)
        clip_qk_(query, key, logits)
        for one, other in zip(cut, (query, key), strict=True):
            found.append(torch.equal(one.full_tensor(), other) and float(other.min()) < 1)
    return found


def keeps_what_is_refused(rule: str, exchange_dtype: torch.dtype | None) -> bool:
    """Return whether a matrix with nonfinite momentum keeps its weight bit for bit while another
    matrix changes."""
    model = build("fsdp")
    options = {"weight_decay": 0.1, "exchange_dtype": exchange_dtype}
    optimizer = optimizer_of(model, rule, units={}, **options)
    train(model, optimizer, "fsdp", 0, 1)
    before = whole(model)
    refused, other = "blocks.0.down.weight", "blocks.0.attention.o_proj.weight"
    momentum = local_of(optimizer.state[model.get_parameter(refused)]["momentum"])
    if dist.get_rank() == 1:
        momentum.view(-1)[0] = torch.nan
    train(model, optimizer, "fsdp", 1, 2)
    after = whole(model)
    return torch.equal(before[refused], after[refused]) and not torch.equal(
        before[other], after[other]
    )


def skipped() -> list[Any]:
    """Return whether all ranks skip a step in which one rank has a nonfinite gradient, and whether
    all ranks refuse the update of one matrix."""
    model = build("fsdp")
    optimizer = optimizer_of(model, "spectral_sphere", nonfinite="skip")
    train(model, optimizer, "fsdp", 0, 2)
    before = whole(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        local = parameter.grad.to_local()  # type: ignore[attr-defined]
        if dist.get_rank() == 1 and local.numel():
            local.view(-1)[0] = torch.nan
    optimizer.step()
    same = all(torch.equal(before[name], value) for name, value in whole(model).items())
    cases = [("muon", torch.bfloat16), ("spectral_sphere", torch.bfloat16)]
    cases += [(name, None) for name, kind in RULES.items() if issubclass(kind, MomentumRule)]
    wrong = [case for case in cases if not keeps_what_is_refused(*case)]
    return [same, int(optimizer.skipped_steps), wrong]


def written(how: str) -> bool:
    """Return whether a step with learning rate 0 keeps weights that were cast to bfloat16 and
    overwritten after a step."""
    model = build(how).float()
    optimizer = optimizer_of(model, "muon", weight_decay=0.0)
    model.bfloat16()
    train(model, optimizer, how, 0, 1)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.data.mul_(3)
    before = whole(model)
    train(model, optimizer, how, 1, 2)
    masters = [state["master"] for state in optimizer.state.values()]
    assert all(master.dtype == torch.float32 for master in masters)
    return all(torch.equal(value, before[name]) for name, value in whole(model).items())
