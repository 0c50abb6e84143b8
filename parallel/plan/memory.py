"""Memory of one rank by kind, computed without running anything."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from models.blocks.attention import ROWS
from models.config import ModelConfig
from models.dense import Recompute
from models.families import FAMILIES
from models.units import Unit
from parallel.comm.groups import ChunkSpec
from parallel.optimizer.routing import Assign, Assignment
from parallel.plan.inputs import PlanInputs
from parallel.storage.bucket_layout import BucketLayout
from spectral.rules.base import Rule
from spectral.sharded.placement import Placement, Work


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    weights       the parameters' buckets, whole on every rank
    gradients     the gradients' buckets, whole on every rank
    master        this rank's shard of the float32 weights, 0 if the parameters are float32
    state         this rank's share of the rules' state, and the weights that owners keep
    activations   estimated
    buffers       estimated transient memory of the optimizer's step
    penalty       estimated transient memory of the Gram penalty, freed before the optimizer's step
    """

    weights: int
    gradients: int
    master: int
    state: int
    activations: int
    buffers: int
    penalty: int = 0

    @property
    def total(self) -> int:
        """Largest sum of what is needed at the same time.

        Activations are gone when the penalty and the optimizer's step need their buffers.
        """
        permanent = self.weights + self.gradients + self.master + self.state
        return permanent + max(self.activations, self.buffers, self.penalty)


@lru_cache(maxsize=1024)
def state_of_matrix(rule: Rule, shape: tuple[int, ...]) -> dict[str, int]:
    """Bytes of a rule's state of one matrix, by name.

    The bytes of a tensor are linear in rows and in cols, as long as the same side is the shorter,
    so those of four small matrices say those of a large one, whose first singular vectors would
    have to be sought otherwise.
    """

    def small(rows: int, cols: int) -> dict[str, int]:
        state = rule.init_state(torch.empty(1, rows, cols, device="meta"))
        return {name: tensor.nbytes for name, tensor in state.items()}

    first, second = (4, 2) if shape[0] > shape[1] else (2, 4)
    rows, cols = shape[0] - first, shape[1] - second
    corner, taller = small(first, second), small(first + 1, second)
    wider, both = small(first, second + 1), small(first + 1, second + 1)
    return {
        name: size
        + rows * (taller[name] - size)
        + cols * (wider[name] - size)
        + rows * cols * (both[name] - taller[name] - wider[name] + size)
        for name, size in corner.items()
    }


def owned_state_bytes(rule: Rule, shape: tuple[int, ...]) -> int:
    """Bytes of a whole-matrix rule's state on a unit's owner, such as cached singular vectors.

    Momentum is not counted: it lies in the shards.
    """
    state = state_of_matrix(rule, shape)
    return sum(size for name, size in state.items() if name not in rule.elementwise_state)


@lru_cache(maxsize=1024)
def pc_bytes(assigned: Assignment, shape: tuple[int, ...]) -> int:
    """Bytes that the owner of a PC layer keeps.

    They are W, the rule's whole state, the tracked singular pair, and gamma with its state and
    gradient.
    """
    assert assigned.pc is not None
    rows, cols = shape
    found = 4 * (rows * cols + rows + cols + 2) + sum(
        state_of_matrix(assigned.rule, shape).values()
    )
    rule = assigned.pc.gamma_rule
    if rule is not None:
        gamma = rule.init_state(torch.empty(1, 1, device="meta"))
        found += sum(tensor.nbytes for tensor in gamma.values())
    return found


@lru_cache(maxsize=1024)
def element_state_bytes(rule: Rule) -> int:
    """Bytes of float32 state that a rule keeps for each element of a shard."""
    if rule.whole_matrix:
        return 4 * len(rule.elementwise_state)
    short, long = (rule.init_state(torch.empty(1, n, device="meta")) for n in (1, 2))
    return sum(long[name].nbytes - short[name].nbytes for name in short)


def activation_bytes(
    model: ModelConfig,
    parts: Sequence[ChunkSpec],
    *,
    tokens: int,
    tensor: int,
    sequence_parallel: bool,
    bytes_per_element: int,
    recompute: Recompute = "none",
    loss_chunk: int | None = None,
    context: int = 1,
    expert_tensor: int = 1,
    compiled: bool = False,
    in_flight: float = 1,
) -> int:
    """Bytes that a rank with these chunks keeps for the backward pass.

    They are those of `in_flight` micro-batches of `tokens` tokens at once, and what exists of one
    alone: what the head has until the loss is there, or later, while a layer goes backward, its
    gradients and what is computed again. The head saves its norm, float32 logits, and those of the
    model's type; with `loss_chunk` it holds float32 logits and their softmax of one chunk at a
    time. With `recompute` selective the feed-forward blocks save nothing but their routed experts'
    tensors, with full a layer saves its input only.
    """
    stream = model.hidden // (tensor if sequence_parallel else 1)
    dense = model.layers if model.moe is None else model.moe.dense_layers
    kinds = Counter(layer >= dense for part in parts for layer in part.layers)
    kept = once = 0
    for mixed, number in kinds.items():
        layer = dense if mixed else 0
        whole, routed = (
            layer_width(
                model,
                layer,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                context=context,
                expert_tensor=expert_tensor,
                compiled=compiled,
                routed_only=routed_only,
            )
            for routed_only in (False, True)
        )
        saved = {"none": whole, "selective": routed, "full": stream}[recompute]
        kept += number * saved
        block = _block_width(model, layer, tensor, routed_only=False)
        # Gradients of the block's tensors, of gate and up once more in one tensor.
        gradients = stream + (_block_copies(model, compiled) + model.gated) * block
        once = max(once, whole - saved + gradients)
    head = 0
    if any(part.head for part in parts):
        rows = model.padded_vocab // tensor
        each = 8 if loss_chunk is not None else 4 + bytes_per_element % 4
        each += 0 if model.final_softcap is None else 4  # the slope of the cap
        head = 2 * tokens * stream * bytes_per_element
        head += each * tokens * (rows if loss_chunk is None else min(rows, loss_chunk))
    return int(tokens * bytes_per_element * kept * in_flight) + max(
        head, tokens * bytes_per_element * once
    )


def layer_width(
    model: ModelConfig,
    layer: int,
    *,
    tensor: int,
    sequence_parallel: bool,
    context: int = 1,
    expert_tensor: int = 1,
    compiled: bool = False,
    routed_only: bool = False,
) -> int:
    """Elements per token that a layer saves for its backward pass.

    They are the inputs and outputs of both norms (cut only by sequence parallelism), what attention
    saves (q, k, v, its output, q and k once more, rotated, grouped queries that are normalised once
    more, and keys and values of the other context ranks) and what the gated block saves (gate, up,
    the activation, a copy of up, their product; `compiled` only gate, up and product; before their
    gate, the output of shared experts). A token's experts, and its rows for them, are counted as if
    they were all on its rank; each of the tensor-parallel ranks sends its share of the tokens to
    experts.
    """
    stream = model.hidden // (tensor if sequence_parallel else 1)
    width = 4 * stream
    sizes = model.head_size + model.value_head_size
    width += (model.heads + model.query_groups) * (sizes + model.head_size) // tensor
    width += (context - 1) * model.query_groups * sizes // tensor  # of the other ranks' tokens
    family = FAMILIES[model.family]
    if family.post_norms:
        width += 2 * stream  # their inputs
    if family.zero_centered_gains:  # inputs and what the gain multiplies, in float32
        width += 3 * stream * (4 if family.post_norms else 2)
    if model.qk_norm and model.query_groups != model.heads:
        width += model.heads * model.head_size // tensor  # the norm's input, copied by heads
    if model.explicit_scores:
        width += model.heads * model.value_head_size // tensor  # the output, by heads
    if model.moe is not None and layer >= model.moe.dense_layers:
        width += model.moe.top_k * model.hidden * expert_tensor // tensor
        if model.moe.shared_gate and not routed_only:
            width += stream  # what the gate multiplies
    block = _block_width(model, layer, tensor, routed_only=routed_only)
    return width + _block_copies(model, compiled) * block


def _block_copies(model: ModelConfig, compiled: bool) -> int:
    """Tensors of the width of a feed-forward block that it saves."""
    return (3 if compiled else 5) if model.gated else 2


def score_bytes(model: ModelConfig, *, tokens: int, tensor: int) -> int:
    """Return the bytes of attention scores that exist for a moment, where no kernel makes them.

    Four float32 copies of the scores of one block of queries, in backward; `tokens` are those of
    one micro-batch.
    """
    if not model.explicit_scores:
        return 0
    return 4 * 4 * model.heads // tensor * min(ROWS, tokens) * tokens


def _block_width(model: ModelConfig, layer: int, tensor: int, *, routed_only: bool) -> int:
    """Width on one rank of a token's feed-forward block in `layer`, or of its routed experts.

    Parts of an expert have as many more rows as they are narrower.
    """
    moe = model.moe
    if moe is None or layer < moe.dense_layers:
        return 0 if routed_only else model.ffn // tensor
    routed = moe.expert_ffn * moe.top_k // tensor
    return routed if routed_only else routed + moe.expert_ffn * moe.shared_experts // tensor


def state_bytes(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    owners: Mapping[str, int],
    assign: Assign,
    inputs: PlanInputs,
) -> np.ndarray:
    """Bytes of the rules' state on each rank of a stage, `[stage ranks]`."""
    shards = bucket_layout.shard_elements(
        (unit, element_state_bytes(assign(unit).rule))
        for unit in units[0]
        if assign(unit).pc is None
    )
    found = np.repeat(shards, inputs.tensor)
    whole = {unit.name: unit for members in units for unit in members if unit.name in owners}
    for name, unit in whole.items():
        assigned = assign(unit)
        if not assigned.has_owner:
            continue
        if assigned.pc is None:
            found[owners[name]] += owned_state_bytes(assigned.rule, unit.shape)
        else:
            found[owners[name]] += pc_bytes(assigned, unit.shape)
    return found


def kept_bytes(
    units: Sequence[Sequence[Unit]],
    works: Sequence[Work],
    owners: Mapping[str, int],
    assign: Assign,
    inputs: PlanInputs,
) -> np.ndarray:
    """Bytes of float32 weights (`StepGroup.kept`) on each owner of a stage, `[stage ranks]`."""
    found = np.zeros(inputs.stage_ranks, dtype=np.int64)
    if inputs.dtype.itemsize >= 4:
        return found
    holders = {work.name: set(work.holders) for work in works}
    whole = {unit.name: unit for members in units for unit in members if unit.name in owners}
    for name, unit in whole.items():
        copied = unit.replicated and inputs.tensor > 1
        if assign(unit).has_owner and assign(unit).pc is None:
            moved = copied or holders[name] != {owners[name]}
            found[owners[name]] += 4 * unit.numel * moved
    return found


def transient_bytes(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    works: Sequence[Work],
    placed: Placement,
    assign: Assign,
    inputs: PlanInputs,
) -> int:
    """Transient bytes of the step group that needs most, on its fullest rank."""
    stepped = {unit.name for each in units for unit in each if assign(unit).has_owner}
    works = [work for work in works if work.name in stepped]
    owned, moved = _by_group(_group_of(units, bucket_layout, inputs), works, placed, inputs)
    # Momentum, weights, their stacks for the rule and its scratch are six float32 copies.
    return int((6 * 4 * owned + inputs.exchange_bytes * moved).max())


def penalty_bytes(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    works: Sequence[Work],
    placed: Placement,
    assign: Assign,
    inputs: PlanInputs,
) -> int:
    """Transient bytes of the Gram penalty, of the step group and rank that need most."""
    shapes = {u.name: u.shape for each in units for u in each if assign(u).penalty is not None}
    works = [work for work in works if work.name in shapes]
    group_of = _group_of(units, bucket_layout, inputs)
    owned, moved = _by_group(group_of, works, placed, inputs)
    stacks: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for work in works:
        shape = shapes[work.name]
        key = (group_of[work.name], placed.owners[work.name], shape)
        # The stack, its gradient and, in a step that is logged, five more copies for the share (a
        # measured number), all float32; and the smaller Gram matrix and its square.
        stacks[key] = stacks.get(key, 0) + 4 * (7 * work.numel + 2 * min(shape) ** 2)
    largest = np.zeros_like(owned)
    for (group, owner, _), size in stacks.items():
        largest[group, owner] = max(largest[group, owner], size)
    # Every unit's weight and gradient with the largest stack, or later with what is sent.
    kept = (inputs.dtype.itemsize + 4) * owned
    return int(np.maximum(kept + largest, kept + 4 * moved).max())


def _group_of(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, inputs: PlanInputs
) -> dict[str, int]:
    """Step group of each unit."""
    groups = bucket_layout.step_groups(inputs.step_groups)
    of_bucket = {bucket: i for i, buckets in enumerate(groups) for bucket in buckets}
    return {
        u.name: of_bucket[bucket_layout.slots[u.parameter][0].index] for each in units for u in each
    }


def _by_group(
    group_of: Mapping[str, int], works: Sequence[Work], placed: Placement, inputs: PlanInputs
) -> tuple[np.ndarray, np.ndarray]:
    """Elements of the units that each rank owns, and that it sends or receives.

    Both are `[step groups, stage ranks]`.
    """
    count = max(group_of.values()) + 1
    owned, moved = np.zeros((2, count, inputs.stage_ranks), dtype=np.int64)
    for work in works:
        owner, group = placed.owners[work.name], group_of[work.name]
        owned[group, owner] += work.numel
        for rank, numel in work.holders.items():
            if rank != owner:
                moved[group, rank] += numel
                moved[group, owner] += numel
    return owned, moved
