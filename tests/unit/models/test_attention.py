"""Attention, with and without caps and windows, compared with attention computed from all scores;
attention kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from models.blocks import attention
from models.blocks.attention import (
    FUSED,
    ROWS,
    DocumentRange,
    attention_kernel,
    causal_attention,
    document_range,
    documents_of,
    largest_causal_score,
    varying_attention,
)
from models.blocks.softcapped_attention import softcapped_attention
from parallel.comm.groups import Groups
from tests.live_bytes import peak_bytes
from tests.models import built
from tests.run_configs import tiny_config
from tests.tiny_families import tiny_model
from training.machine.backends import kernel_of

Problem = tuple[Tensor, Tensor, Tensor]


def problem(s: int, t: int, groups: int = 2, dtype: torch.dtype = torch.float64) -> Problem:
    """Return queries of 4 heads, keys and values. The queries have a standard deviation of 3."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return 3 * draw(s, 2, 4, 8), draw(t, 2, groups, 8), draw(t, 2, groups, 6)


def visible(s: int, t: int, window: int | None) -> Tensor:
    """Return the mask of the keys that each query attends to, `[s, t]`, computed pair by pair."""
    pairs = [
        [key <= query and (window is None or key > query - window) for key in range(t)]
        for query in range(t - s, t)
    ]
    return torch.tensor(pairs)


DOCUMENTS = [[3, 1, 5, 11], [20]]
"""Lengths of the documents of the two sequences."""


def documents(s: int, t: int) -> DocumentRange:
    """Return the documents at the last s of t positions in each sequence, which are the last rank's
    chunk."""
    rows = []
    for lengths in DOCUMENTS:
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        rows.append(torch.tensor(begins).repeat_interleave(torch.tensor(lengths))[:t])
    firsts = torch.stack(rows)[:, t - s :]
    return document_range(firsts, range(t - s, t), Tensor.clone)


def same_document(s: int, t: int) -> Tensor:
    """Return the mask of the keys in the same document as each query, `[2, s, t]`, computed pair by
    pair."""
    numbers = [[i for i, n in enumerate(lengths) for _ in range(n)] for lengths in DOCUMENTS]
    rows = [[[a == b for b in row[:t]] for a in row[t - s : t]] for row in numbers]
    return torch.tensor(rows)


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return scaled scores `[b, heads, s, t]`."""
    keys = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    return scale * torch.einsum("sbhd,tbhd->bhst", query, keys)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cap: float | None,
    window: int | None,
    apart: DocumentRange | None = None,
) -> Tensor:
    """Compute attention by its definition: scores of all pairs, cap, mask, softmax, weighted
    values."""
    found = scores(query, key, scale)
    if cap is not None:
        found = cap * torch.tanh(found / cap)
    found = found.masked_fill(~visible(len(query), len(key), window), -torch.inf)
    if apart is not None:
        same = same_document(len(query), len(key))
        found = found.masked_fill(~same[:, None], -torch.inf)
    values = value.repeat_interleave(query.shape[2] // value.shape[2], 2)
    return torch.einsum("bhst,tbhd->sbhd", found.softmax(-1), values).flatten(2)


def outputs_and_gradients(function, inputs: Problem, *arguments: object) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *arguments)
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    (out * weights.to(out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, ROWS + 3, 10_000])
@pytest.mark.parametrize(("s", "t"), [(9, 9), (2 * ROWS + 5, 2 * ROWS + 5), (6, 20)])
def test_equals_the_definition(cap: float | None, window: int | None, s: int, t: int) -> None:
    """Test one block and several blocks of queries, and the last queries of a sequence, as in
    context parallelism."""
    arguments = (0.4, cap, window)
    ours = outputs_and_gradients(softcapped_attention, problem(s, t), *arguments)
    expected = outputs_and_gradients(reference, problem(s, t), *arguments)
    # float64 sums of some hundred terms
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_any_number_of_key_heads_with_and_without_caps(groups: int, queries: int) -> None:
    inputs = problem(queries, 9, groups)
    for function, arguments in ((softcapped_attention, (3.0, 4)), (causal_attention, ())):
        ours = outputs_and_gradients(function, inputs, 0.4, *arguments)
        expected = outputs_and_gradients(reference, inputs, 0.4, *(arguments or (None, None)))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_bfloat16_is_nearer_to_the_definition_than_with_scores_in_bfloat16() -> None:
    arguments = (0.4, 5.0, 40)
    exact = outputs_and_gradients(
        reference, tuple(x.double() for x in problem(64, 64, dtype=torch.bfloat16)), *arguments
    )

    def errors(function) -> list[float]:
        found = outputs_and_gradients(function, problem(64, 64, dtype=torch.bfloat16), *arguments)
        assert all(each.dtype == torch.bfloat16 for each in found)
        return [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
        ]

    ours, whole = errors(softcapped_attention), errors(reference)
    assert all(a < b for a, b in zip(ours, whole, strict=True)), (ours, whole)
    assert max(ours) < 8e-3  # two roundings to 8 bits, of weights and of results


def test_small_bfloat16_attention_on_a_cpu_only_rounds_its_results() -> None:
    query, key, _ = problem(64, 64, dtype=torch.bfloat16)
    inputs = (query, key, key.flip(0))

    def exact(*inputs: Tensor) -> Tensor:
        return reference(*inputs, 0.4, None, None).bfloat16()

    found = outputs_and_gradients(causal_attention, inputs, 0.4)
    expected = outputs_and_gradients(exact, tuple(x.double() for x in inputs))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2**-7, atol=1e-4)


def test_scores_never_exist_in_full() -> None:
    """The forward and backward passes allocate less memory than one float32 copy of all heads'
    scores."""
    length = 8 * ROWS
    inputs = problem(length, length, dtype=torch.float32)
    one_copy = 4 * 2 * 4 * length**2

    def step() -> None:
        outputs_and_gradients(softcapped_attention, inputs, 0.4, 5.0, None)

    assert peak_bytes(step) < 0.9 * one_copy


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gemma2", 5), ("gemma2", ROWS)])
def test_the_largest_logit_of_a_layer_is_one_that_its_mask_lets_through(family, window, world):
    model = tiny_model(family, sliding_window=window)
    layers = built(model)[0].decoder.layers
    together = documents_of(documents(20, 20).firsts, Tensor.clone)
    for length, given in ((2 * ROWS + 5, None), (20, together)):
        query, key, _ = problem(length, length)
        key[0, 0] = 3 * query[-1, 0, ::2]  # the largest score, of another document
        apart = torch.tensor(True) if given is None else same_document(length, length)[:, None]
        for i, layer in enumerate(layers):
            core = layer.self_attention.core_attention
            seen = visible(length, length, model.window(i)) & apart
            largest = scores(query, key, core.scale).masked_fill(~seen, -torch.inf).amax()
            found = core.largest_logit(query, key, given).item()
            assert found == pytest.approx(largest.item(), rel=1e-12)


@pytest.mark.parametrize(("s", "t"), [(20, 20), (5, 20), (4, 7), (9, 9)])
def test_documents_see_themselves_alone(s: int, t: int) -> None:
    """Test whole sequences, and the last part of sequences as in context parallelism."""
    inputs, apart = problem(s, t), documents(s, t)
    for function, given in (
        (softcapped_attention, (3.0, 4)),
        (softcapped_attention, (None, None)),
        (causal_attention, ()),
    ):
        ours = outputs_and_gradients(function, inputs, 0.4, *given, apart)
        expected = outputs_and_gradients(reference, inputs, 0.4, *(given or (None, None)), apart)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    every = scores(*inputs[:2], 0.4).masked_fill(~visible(s, t, 4), -torch.inf)
    every = every.masked_fill(~same_document(s, t)[:, None], -torch.inf)
    largest = largest_causal_score(*inputs[:2], 0.4, 4, apart)
    assert largest.item() == pytest.approx(every.amax().item(), rel=1e-12)


def one_after_another(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *most: int,
    scale: float, **options: Any,
) -> Tensor:  # fmt: skip
    """Compute PyTorch's varlen_attn by its definition, document by document. The queries are at the
    last positions."""
    assert options["window_size"] == (-1, 0)
    assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
    ends = [each.tolist() for each in (queries, keys)]
    assert [ends[0][-1], ends[1][-1]] == [len(query), len(key)]
    assert list(most) == [int(each.diff().amax()) for each in (queries, keys)]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    outs = []
    for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        if b > a:
            own = query[a:b, None], key[c:d, None], value[c:d, None]
            outs.append(reference(*own, scale, None, None).squeeze(1))
    return torch.cat(outs).unflatten(1, (query.shape[1], -1))


@pytest.mark.parametrize(("s", "t"), [(20, 20), (5, 20), (4, 7), (9, 9)])
def test_the_kernel_of_variable_length_gets_the_documents(s, t, monkeypatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", one_after_another)
    apart = documents(s, t)
    ours = outputs_and_gradients(varying_attention, problem(s, t), 0.4, apart)
    expected = outputs_and_gradients(reference, problem(s, t), 0.4, None, None, apart)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_documents_on_a_gpu_need_the_kernel_of_variable_length() -> None:
    gpu = torch.device("cuda")
    name = attention_kernel(4, 2, 128, 64, dtype=torch.bfloat16, device=gpu, documents=True)
    assert name == "flash_attention of variable length"
    rule = "supports 16-bit dtypes and head dimensions up to 256, got "
    for size, dtype in ((64, torch.float32), (264, torch.bfloat16)):
        with pytest.raises(RuntimeError, match=rule):
            attention_kernel(4, 2, size, size, dtype=dtype, device=gpu, documents=True)


CPU = torch.device("cpu")


def test_the_named_kernel_is_the_one_that_runs(world: Groups, tmp_path: object) -> None:
    config = tiny_config(str(tmp_path))
    name = kernel_of(config, world)
    assert name == attention_kernel(4, 2, 16, 16, dtype=torch.float32, device=CPU)
    query, key = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 2, 16)
    with torch.profiler.profile() as profiler:
        causal_attention(query, key, key, 0.25)
    ran = " ".join(event.key for event in profiler.key_averages())
    assert ("flash_attention" in ran) == (name == "flash_attention")
    assert name in ("flash_attention", "math")
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(4, 2, 16, 16, dtype=torch.float32, device=CPU) == "math"


def test_a_fused_kernel_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the rule for GPUs on a CPU: no fused kernel supports values whose width differs from
    that of the keys."""
    monkeypatch.setattr(attention, "allowed_kernels", lambda query: sdpa_kernel(FUSED))
    query, value = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 4, 6)
    causal_attention(query, query, query, 0.25)
    with pytest.raises(RuntimeError, match="No available kernel"):
        causal_attention(query, query, value, 0.25)
    with pytest.raises(RuntimeError, match="No available kernel"):
        attention_kernel(4, 4, 16, 6, dtype=torch.float32, device=CPU)
