"""Weight gradients, added to float32 sums by matmuls of 16-bit operands."""

import torch

from parallel.storage.domain_model import add_product_


def test_a_product_is_added_to_a_part_of_a_bucket(world):
    torch.manual_seed(0)
    bucket = torch.zeros(1 + 48 * 32, device=world.device)
    total = bucket[1:].view(48, 32)
    expected = torch.zeros_like(total)
    for _ in range(2):
        gradient, inputs = torch.randn(2, 64, 48, device=world.device).bfloat16().unbind()
        inputs = inputs[:, :32]
        add_product_(total, gradient.t(), inputs)
        expected += gradient.t().float() @ inputs.float()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    assert bucket[0] == 0
