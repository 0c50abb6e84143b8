"""Rules for stable ranks at initialisation, tested in whole models with float64 SVDs.

The rules are from table 1 in "When do spectral gradient updates help in deep learning?". The
theorems of its section 3 bound the stable rank after a block by a constant times the stable rank
before it, and the effect of Gaussian weights by (1 + e) / (1 - e). e = 1/4 is for the 64 to 512
rows here: norms of Gaussian matrices of k rows deviate by a multiple of k^-0.5.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.matrices import stable_rank
from tests.run_configs import tiny_config
from training.build import build_trainer
from training.data.build_data import build_data
from training.loop import Loop

SLACK = (1 + 0.25) / (1 - 0.25)
HIDDEN, LAYERS = 64, 3
GPT = {"model__family": "gpt", "model__activation": "relu2", "model__qk_norm": True}
Kept = dict[str, tuple[Tensor, Tensor]]


def singular_values(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


def column_norms(matrix: Tensor) -> Tensor:
    """Return the squared norm of each token's vector."""
    return matrix.double().square().sum(0)


@pytest.fixture(params=["relu2", "swiglu"])
def forward(request, world, folder) -> tuple[str, Kept, dict[str, Tensor]]:
    """The name of the activation function, the inputs and outputs `[features, tokens]` of each
    module in one forward pass at Gaussian initialisation, and the weights."""
    keys = GPT | {"model__kv_heads": 4, "model__ffn": 4 * HIDDEN, "model__layers": LAYERS}
    init = {"model__init__spectral": False, "model__init__std": "null"}
    config = tiny_config(folder, "adamw", **keys | init | {"model__activation": request.param})
    trainer = build_trainer(config, world, *build_data(config))
    (chunk,) = trainer.model.chunks
    kept: Kept = {}

    def watch(name: str):
        def after(module: nn.Module, args, kwargs, output) -> None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            result = output[0] if isinstance(output, tuple) else output
            if given and given[0].is_floating_point() and isinstance(result, Tensor):
                kept.setdefault(name, (flat(given[0]), flat(result)))

        return after

    for name, module in chunk.named_modules():
        module.register_forward_hook(watch(name), with_kwargs=True)
    Loop(trainer).step_and_report()
    weights = {name: each.detach() for name, each in chunk.named_parameters()}
    return request.param, kept, weights


def flat(x: Tensor) -> Tensor:
    """Reshape `[..., features]` to `[features, tokens]`."""
    return x.detach().reshape(-1, x.shape[-1]).T.clone()


def test_a_linear_map_keeps_the_stable_rank(forward) -> None:
    """Test theorem 3.1 for q, k and v together, and for up (and gate)."""
    _, kept, _ = forward
    places = [name for name in kept if name.endswith(("linear_qkv", "linear_fc1"))]
    assert len(places) == 2 * LAYERS
    for place in places:
        before, after = kept[place]
        assert stable_rank(after) <= SLACK * stable_rank(before), place


def test_a_norm_keeps_it_up_to_the_spread_of_column_norms(forward) -> None:
    """Test theorem 3.2, which holds for every matrix."""
    _, kept, _ = forward
    places = [n for n in kept if n.endswith(("input_layernorm", "pre_mlp_layernorm"))]
    assert len(places) == 2 * LAYERS
    for place in places:
        before, after = kept[place]
        norms = column_norms(before)
        # The epsilon under the root and float32 activations.
        assert torch.allclose(column_norms(after), torch.tensor(HIDDEN).double(), rtol=0.05), place
        bound = float(norms.max() / norms.min()) * stable_rank(before)
        assert stable_rank(after) <= bound * 1.05, place


def test_a_residual_connection_keeps_the_least(forward) -> None:
    """Test theorem 3.5 for the outputs of attention and the feed-forward block."""
    _, kept, weights = forward
    seen = 0
    for layer in range(LAYERS):
        place = f"decoder.layers.{layer}"
        stream = kept[place][0]
        middle = kept[f"{place}.pre_mlp_layernorm"][0]
        for x, after, linear in (
            (stream, middle, f"{place}.self_attention.linear_proj"),
            (middle, kept[place][1], f"{place}.mlp.linear_fc2"),
        ):
            h, added = kept[linear]
            torch.testing.assert_close(x + added, after, rtol=1e-4, atol=1e-5)
            # The theorem's W has variance 1 / k for h of k rows; another scale of W only scales h.
            scale = weights[f"{linear}.weight"].double().std()
            first, second = singular_values(x) / len(x) ** 0.5, singular_values(h) * scale
            total = first.square().sum() + second.square().sum()
            bound = total / max(first[0], second[0]).square()
            assert stable_rank(after) <= SLACK * float(bound), linear
            seen += 1
    assert seen == 2 * LAYERS


def test_an_activation_function_bounds_it(forward) -> None:
    """The bound is E f^2 / (E f)^2 = 6 for squared ReLU, whose mean is not 0 (section 2.2), and
    kappa^-2 st(X) for SwiGLU (theorem 3.8), with kappa = E silu(g) = 0.2066 for Gaussian gates g.
    """
    activation, kept, _ = forward
    for layer in range(LAYERS):
        place = f"decoder.layers.{layer}.mlp"
        before, after = kept[f"{place}.linear_fc1"][0], kept[f"{place}.linear_fc2"][0]
        if activation == "relu2":
            assert stable_rank(after) <= SLACK * 6, place
        else:
            assert stable_rank(after) <= SLACK * 0.2066**-2 * stable_rank(before), place


def test_what_feeds_the_blocks_stays_below_the_token_indicators(forward) -> None:
    """Test corollary 5.2: from the embedding on, the stable rank equals that of the tokens up to
    constants, and does not grow with depth."""
    activation, kept, _ = forward
    inputs = [kept[f"decoder.layers.{i}.self_attention.linear_qkv"][0] for i in range(LAYERS)]
    ranks = [stable_rank(each) for each in inputs]
    assert all(later <= SLACK * earlier for earlier, later in pairwise(ranks)), activation
    assert ranks[-1] < HIDDEN / 2
