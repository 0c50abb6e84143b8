"""Names against the watch, over the models of other libraries.

Wherever both say how a weight is divided they must agree, but for `ACCEPTED`, whose entries say
why; a difference that is not listed, or an error that is no ValueError about weights, fails.

Prints how many models of each library are right by comparison, refused or not watchable, and which.
SWEEP=llama,vit sweeps these alone.
"""

import importlib
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from spectral import split_parameters
from spectral.division import Division

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "moe_intermediate_size"), 48
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads", "num_kv_heads"), 2),
    **{
        "vocab_size": 99,
        "head_dim": 8,
        "d_kv": 8,
        "image_size": 32,
        "patch_size": 8,
        "rotary_dim": 4,
    },
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "state_size": 4},
    **{"max_position_embeddings": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "embedding_size": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
"""What makes the models of transformers small, where a config has it."""

ACCEPTED = {
    r"deepseek_v4 .*kv_proj": "a tiny config whose groups of outputs are smaller than a head",
    r"doge .*dt_proj": "one output a head: vectors by use, which no name shows",
    r"convbert .*conv_out_layer": "outputs that are convolved one at a time",
    r"convbert .*conv_kernel_layer": "kernels of heads, whose size is that of no head",
    r"inkling2_text .*r_proj": "relative positions by heads, of a name that no table has",
    r"modernbert-decoder .*lm_head.dense": "a hidden layer that is called a head",
    r"neomme .*output_projection.o_proj": "an inner layer in a module that is called a head",
    r"recurrent_gemma .*linear_x": "gates of the recurrence take blocks of what is added whole",
}
"""Differences between names and the watch, by model and weight, and why they stay."""


def tiny(config_class: Any, sizes: dict[str, Any]) -> Any:
    default = config_class()
    own = {k: v for k, v in sizes.items() if hasattr(default, k)}
    for key in ("layer_types", "mlp_layer_types", "rope_parameters"):
        own.pop(key, None)
    return config_class(**own)


def transformer(name: str, kind: str) -> tuple[nn.Module, Any]:
    import transformers

    config_class = transformers.CONFIG_MAPPING[name]
    mapping = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{kind}_MAPPING")
    model_class = mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    for drop in ((), ("head_dim",), ("head_dim", "num_key_value_heads")):
        try:
            config = tiny(config_class, {k: v for k, v in SIZES.items() if k not in drop})
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            break
        except Exception as error:
            failure = error
    else:
        raise failure
    if size > 5e6:
        raise MemoryError("it has no small config")
    model = model_class(config).eval()
    if "IMAGE" in kind:
        side = getattr(config, "image_size", 32)
        side = side if isinstance(side, int) else side[0]
        return model, {
            "pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)
        }
    ids = torch.randint(3, 90, (2, 16))
    inputs = {"input_ids": ids}
    if "SEQ_TO_SEQ" in kind:
        inputs["decoder_input_ids"] = ids
    return model, inputs


def transformers_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity(60)
    for kind in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION"):
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        for name in names:
            yield f"{name} {kind.lower()}", lambda n=name, k=kind: transformer(n, k)


def timm_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    timm = pytest.importorskip("timm")
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            smallest = min(names, key=lambda n: (len(n), n))

            def build(name: str = smallest) -> tuple[nn.Module, Any]:
                with torch.device("meta"):
                    model = timm.create_model(name, num_classes=10)
                if sum(p.numel() for p in model.parameters()) > 2e7:
                    raise MemoryError(f"{name} is large")
                model = timm.create_model(name, num_classes=10).eval()
                return model, torch.randn(1, *model.default_cfg["input_size"])

            yield f"{module}: {smallest}", build


def diffusers_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    diffusers = pytest.importorskip("diffusers")
    blocks = {
        "diffusers.models.attention:BasicTransformerBlock": (
            lambda c: c(32, 4, 8),
            lambda: torch.randn(2, 6, 32),
        ),
        "diffusers.models.resnet:ResnetBlock2D": (
            lambda c: c(in_channels=32, temb_channels=24),
            lambda: (torch.randn(2, 32, 8, 8), torch.randn(2, 24)),
        ),
        "diffusers.models.attention:FeedForward": (
            lambda c: nn.Sequential(c(32, activation_fn="geglu"), nn.Linear(32, 4)),
            lambda: torch.randn(2, 6, 32),
        ),
        "diffusers.models.unets.unet_2d:UNet2DModel": (
            lambda c: c(
                sample_size=16,
                block_out_channels=(32, 64),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                norm_num_groups=8,
            ),
            lambda: (torch.randn(1, 3, 16, 16), torch.tensor([3])),
        ),
        "diffusers.models.transformers.dit_transformer_2d:DiTTransformer2DModel": (
            lambda c: c(
                num_attention_heads=4,
                attention_head_dim=8,
                sample_size=8,
                num_layers=2,
                in_channels=4,
                out_channels=4,
                norm_num_groups=4,
            ),
            lambda: {
                "hidden_states": torch.randn(2, 4, 8, 8),
                "timestep": torch.tensor([1, 2]),
                "class_labels": torch.tensor([1, 2]),
            },
        ),
    }
    assert diffusers
    for path, (build, example) in blocks.items():
        module, name = path.split(":")
        kind = getattr(importlib.import_module(module), name)
        yield name, lambda b=build, k=kind, e=example: (b(k).eval(), e())


LIBRARIES = {
    f.__name__.partition("_")[0]: f for f in (transformers_models, timm_models, diffusers_models)
}


def divisions(model: nn.Module, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the division of each weight, None for AdamW, and why others are refused."""
    refused: dict[str, str] = {}
    for _ in range(1000):
        try:
            split = split_parameters(model, units={n: {} for n in refused}, **options)
            break
        except ValueError as error:
            lines = str(error).splitlines()
            new = {line.split(":")[0].split(" ")[0]: line for line in lines}
            names = {n for n, _ in model.named_parameters()}
            new = {n: line for n, line in new.items() if n in names and n not in refused}
            if not new:
                raise
            refused |= new
    found = {n: g.get("units") for g in split for n, p in g["params"] if n not in refused}
    reasons = {row.name: row.reason for row in split.rows}
    return found, {**reasons, **refused}


def boxes(units: dict[str, Any], shape: torch.Size) -> set[Any]:
    return {
        tuple((r.start, len(r), r.step if len(r) > 1 else 1) for r in box)
        for box in Division.of(units).boxes(shape)
    }


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_agree_with_the_watch(library: str) -> None:
    only = [w for w in os.environ.get("SWEEP", "").split(",") if w]
    outcome: dict[str, list[str]] = defaultdict(list)
    differences: list[str] = []
    for name, build in LIBRARIES[library]():
        if only and not any(w in name for w in only):
            continue
        torch.manual_seed(0)
        try:
            model, example = build()
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model(**example) if isinstance(example, dict) else model(
                    *(example if isinstance(example, tuple) else (example,))
                )
        except Exception as error:
            outcome["not watchable"].append(f"{name}: {type(error).__name__} {str(error)[:90]!r}")
            continue
        try:
            (seen, why), (named, _) = divisions(model, example=example), divisions(model)
        except Exception as error:
            outcome["failed"].append(name)
            differences.append(f"{name}: {type(error).__name__} {str(error)[:300]}")
            print(differences[-1], flush=True)
            if os.environ.get("SWEEP_RAISE"):
                raise
            continue
        shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        wrong = []
        for weight in seen.keys() & named.keys():
            both = seen[weight], named[weight]
            if None in both:
                same = both[0] is both[1]
            else:
                same = boxes(both[0], shapes[weight]) == boxes(both[1], shapes[weight])
            if not same:
                wrong.append(
                    f"{weight} {tuple(shapes[weight])}: by name {both[1]}, "
                    f"seen {both[0]}, {why[weight]}"
                )
        refused = [why[n] for n in shapes if n not in seen]
        heads = [w for w in wrong if w.endswith(": a head")]
        kind = "disagree" if len(wrong) > len(heads) else "refused" if refused else "right"
        outcome[kind].append(name)
        print(name, kind, len(seen.keys() & named.keys()), flush=True)
        for line in sorted(wrong)[:6] + refused[:4]:
            print("     ", line[:260], flush=True)
        differences += [f"{name}: {line}" for line in sorted(wrong) if line not in heads]
    differences = [d for d in differences if not any(re.match(key, d) for key in ACCEPTED)]
    for kind, names in outcome.items():
        print(f"{library}: {len(names)} {kind}: {'; '.join(names)}")
    assert not differences
