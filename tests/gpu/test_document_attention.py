"""Document-masked attention on a CUDA device: the variable-length kernel compared with float64."""

import pytest
import torch
from torch import Tensor

from models.blocks.attention import DocumentRange, causal_attention, document_range

LENGTH, CHUNK = 512, 128
DOCUMENTS = [[1, 200, 63, 248], [512], [1] * 512]
"""Lengths of the documents in each sequence."""


def outputs_and_gradients(inputs: list[Tensor], documents: DocumentRange) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = causal_attention(*leaves, 0.2, documents)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("begin", [0, LENGTH - CHUNK])
@pytest.mark.parametrize(("groups", "value_size"), [(8, 64), (2, 64), (8, 32)])
def test_documents_see_themselves_alone(begin: int, groups: int, value_size: int) -> None:
    """Test whole sequences, and the last chunk in context parallelism, in which no query attends to
    the first keys."""
    rows = [
        torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]).repeat_interleave(
            torch.tensor(lengths)
        )[begin:]
        for lengths in DOCUMENTS
    ]
    firsts = torch.stack(rows)
    chunk = range(begin, LENGTH)
    documents = document_range(firsts, chunk, Tensor.cuda)
    shapes = [
        (len(chunk), len(DOCUMENTS), 8, 64),
        (LENGTH, len(DOCUMENTS), groups, 64),
        (LENGTH, len(DOCUMENTS), groups, value_size),
    ]
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    ours = outputs_and_gradients(inputs, documents)
    exact = outputs_and_gradients([x.double() for x in inputs], documents)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 1e-2 * b.norm()  # results are rounded to 8 bits
