"""The watch on models of other libraries, against names, steps and heads.

- If names and the watch both divide a weight they must agree, except in `ACCEPTED`, whose entries
state the reasons; an unlisted difference, or an error other than a ValueError about weights, fails.
- A step on the weights must equal the steps of their pieces in another optimizer.
- Changing the rows of one matrix must change one head of the queries, keys and values that the
model passes to attention.

It prints the number and the names of each library's models that are right by comparison, refused,
or not watchable. SWEEP=llama,vit sweeps only these models.
"""

import importlib
import inspect
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral import Muon, split_parameters
from spectral.division import Division, narrowed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
VALUES = {
    32: "hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size image_size",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads rotary_dim state_size"
    " decoder_attention_heads num_experts num_local_experts n_routed_experts qk_rope_head_dim"
    " linear_num_value_heads",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers o_groups"
    " num_decoder_layers num_experts_per_tok num_key_value_heads num_kv_heads eos_token_id"
    " linear_num_key_heads",
    48: "intermediate_size ffn_dim d_ff n_inner moe_intermediate_size encoder_ffn_dim"
    " decoder_ffn_dim shared_expert_intermediate_size",
    8: "head_dim d_kv patch_size qk_nope_head_dim linear_key_head_dim linear_value_head_dim",
    12: "q_lora_rank kv_lora_rank",
    1: "n_group topk_group first_k_dense_replace bos_token_id",
    **{99: "vocab_size", 64: "max_position_embeddings", 6: "v_head_dim", 0: "pad_token_id"},
}
SIZES = {name: value for value, names in VALUES.items() for name in names.split()}
SIZES["use_cache"] = False
"""Settings that make models in transformers small. Settings that a config does not have are
ignored."""

ACCEPTED = {
    r"jetmoe .*experts.* changes": "an expert, which is the head of tokens that choose it so",
    r"rvt.* ": "the class token, which is no convolution's, is a query of each head",
}
"""Maps models and weights for which names and the watch may differ to the reason."""


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
        shape = getattr(config, "num_channels", 3), *([side] * 2 if isinstance(side, int) else side)
        return model, {"pixel_values": torch.randn(2, *shape)}
    ids = torch.randint(3, 90, (2, 16))
    return model, {"input_ids": ids} | ({"decoder_input_ids": ids} if "SEQ_TO_SEQ" in kind else {})


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
            small = [n for n in names if re.search(SMALL, n)] or names
            smallest = min(small, key=lambda n: (len(n), n))

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
    unet: dict[str, Any] = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    unet |= {"sample_size": 16, "layers_per_block": 1}
    plain = unet | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    plain |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    cross = unet | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    cross |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    cross |= {"cross_attention_dim": 24, "attention_head_dim": 4}
    dit = {"num_attention_heads": 4, "attention_head_dim": 8, "sample_size": 8, "num_layers": 2}
    dit |= {"in_channels": 4, "out_channels": 4, "norm_num_groups": 4}
    draw, time = torch.randn, torch.tensor([3])
    labels = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}
    blocks: dict[str, tuple[Callable[[Any], nn.Module], Callable[[], Any]]] = {
        "attention:BasicTransformerBlock": (lambda c: c(32, 4, 8), lambda: draw(2, 6, 32)),
        "resnet:ResnetBlock2D": (
            lambda c: c(in_channels=32, temb_channels=24),
            lambda: (draw(2, 32, 8, 8), draw(2, 24)),
        ),
        "attention:FeedForward": (
            lambda c: nn.Sequential(c(32, activation_fn="geglu"), nn.Linear(32, 4)),
            lambda: draw(2, 6, 32),
        ),
        "unets.unet_2d:UNet2DModel": (lambda c: c(**plain), lambda: (draw(1, 3, 16, 16), time)),
        "unets.unet_2d_condition:UNet2DConditionModel": (
            lambda c: c(**cross),
            lambda: (draw(1, 4, 16, 16), time, draw(1, 6, 24)),
        ),
        "transformers.dit_transformer_2d:DiTTransformer2DModel": (
            lambda c: c(**dit),
            lambda: {"hidden_states": draw(2, 4, 8, 8), **labels},
        ),
    }
    for path, (build, example) in blocks.items():
        module, name = path.split(":")
        kind = getattr(importlib.import_module(f"{diffusers.__name__}.models.{module}"), name)
        yield name, lambda b=build, k=kind, e=example: (b(k).eval(), e())


def torchvision_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    models = pytest.importorskip("torchvision").models
    swin = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6]}
    swin |= {"window_size": [4, 4], "num_classes": 10}
    stages = [models.convnext.CNBlockConfig(16, 24, 2), models.convnext.CNBlockConfig(24, None, 1)]
    builders = {
        "ViT": lambda: models.VisionTransformer(64, 16, 2, 4, 32, 48, num_classes=10),
        "Swin": lambda: models.SwinTransformer(**swin),
        "Swin v2": lambda: models.SwinTransformer(
            **swin,
            block=models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=models.swin_transformer.PatchMergingV2,
        ),
        "ConvNeXt": lambda: models.ConvNeXt(stages, num_classes=10),
    }
    names = "mobilenet_v2 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 mnasnet0_5 resnet18"
    for name in (*names.split(), "efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet"):
        builders[name] = lambda n=name: models.get_model(n, weights=None, num_classes=10)
    for name, build in builders.items():
        yield name, lambda b=build: (b().eval(), torch.randn(1, 3, 64, 64))


def vit_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    """Yield models in vit_pytorch that have the same constructor as its first model."""
    package = pytest.importorskip("vit_pytorch")
    common = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2}
    common |= {"heads": 4, "mlp_dim": 48, "dim_head": 8}
    names = "vit.ViT simple_vit.SimpleViT deepvit.DeepViT parallel_vit.ViT"
    names += " vit_for_small_dataset.ViT"
    names += " vit_with_patch_dropout.ViT vit_with_patch_merger.ViT normalized_vit.nViT rvt.RvT"
    names += " simple_vit_with_qk_norm.SimpleViT simple_vit_with_register_tokens.SimpleViT"
    names += " simple_vit_with_value_residual.SimpleViT learnable_memory_vit.ViT cait.CaiT"
    for name in names.split():
        module, kind = name.split(".")

        def build(module: str = module, kind: str = kind) -> tuple[nn.Module, Any]:
            make = getattr(importlib.import_module(f"{package.__name__}.{module}"), kind)
            own = {k: v for k, v in common.items() if k in inspect.signature(make).parameters}
            extra = {"cls_depth": 1} if kind == "CaiT" else {}
            return make(**own, **extra).eval(), torch.randn(2, 3, 32, 32)

        yield name, build


def peft_models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    """Yield transformers models with adapters and frozen base weights."""
    peft = pytest.importorskip("peft")
    for name in ("llama", "qwen3", "phi3", "gpt_neox", "opt", "gpt2", "mistral", "gemma"):

        def build(name: str = name) -> tuple[nn.Module, Any]:
            model, inputs = transformer(name, "CAUSAL_LM")
            config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            return peft.get_peft_model(model, config).eval(), inputs

        yield f"LoRA of {name}", build


MADE = (
    transformers_models,
    timm_models,
    diffusers_models,
    torchvision_models,
    vit_models,
    peft_models,
)
LIBRARIES = {function.__name__.removesuffix("_models"): function for function in MADE}
SMALL = re.compile(
    r"test_|tiny|nano|pico|femto|atto|micro|mini|xxs|_xs|small|_s(_|$)|_b0|_s0|_m0|ti_|_t(_|$)|_n_|18"
)
"""Matches the names of small models in timm."""
CAPTURED_AT_LEAST = {"transformers": 100, "diffusers": 1}
"""Minimum number of models in each library for which changing one matrix changes exactly one
head."""


def run(model: nn.Module, example: Any) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if isinstance(example, dict):
            model(**example)
        else:
            model(*(example if isinstance(example, tuple) else (example,)))


def step_difference(model: nn.Module, found: dict[str, Any]) -> float:
    """Return the largest relative difference between a step of a weight and the steps of its
    pieces, for one weight per shape and division."""
    weights = {(str(u), model.get_parameter(n).shape): n for n, u in found.items() if u is not None}
    whole, pieces = dict[str, nn.Parameter](), dict[str, list[nn.Parameter]]()
    groups: list[dict[str, Any]] = []
    for i, name in enumerate(list(weights.values())[:24]):
        division = Division.of(found[name])
        weight = nn.Parameter(model.get_parameter(name).detach().clone())
        weight.grad = torch.randn_like(weight)

        def cut(tensor: Tensor, division: Division = division) -> list[Tensor]:
            boxes = division.boxes(tensor.shape)
            return [division.matrix(narrowed(tensor, box)).clone() for box in boxes]

        whole[name], pieces[name] = weight, [nn.Parameter(part) for part in cut(weight.detach())]
        for part, grad in zip(pieces[name], cut(weight.grad), strict=True):
            part.grad = grad
        groups.append({"params": [(f"w{i}.x", weight)], "units": division.settings()})
    before = {name: weight.detach().clone() for name, weight in whole.items()}
    if not groups:
        return 0.0
    options: dict[str, Any] = {"lr": 0.1, "msign_dtype": torch.float32}
    Muon(groups, **options).step()
    Muon([p for parts in pieces.values() for p in parts], **options).step()
    worst = 0.0
    for name, weight in whole.items():
        division = Division.of(found[name])
        for box, part in zip(division.boxes(weight.shape), pieces[name], strict=True):
            stepped, start = (division.matrix(narrowed(w, box)) for w in (weight, before[name]))
            worst = max(worst, float((stepped - part).norm() / (part - start).norm()))
    return worst


def heads_of(calls: list[tuple[Tensor, ...]], call: int) -> list[list[Tensor]]:
    """Return the distinct heads of the queries, the keys and the values in one call of
    attention."""
    heads = []
    for tensor in calls[call]:
        own: list[Tensor] = []
        for head in tensor.unbind(1):
            if not any(torch.equal(head, other) for other in own):
                own.append(head)
        heads.append(own)
    return heads


def differ(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return any(not torch.equal(*pair) for pair in zip(a, b, strict=True))


def compared_heads(
    model: nn.Module, example: Any, found: dict[str, Any], why: dict[str, str]
) -> tuple[int, list[str]]:
    """Change matrices one by one. Return the number of matrices that changed exactly one head, and
    a list of the matrices that changed anything else."""
    calls: list[tuple[Tensor, ...]] = []
    attention = F.scaled_dot_product_attention

    def captured(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if query.ndim == 4:
            calls.append((query, key, value))
        return attention(query, key, value, *args, **options)

    def calls_of() -> list[tuple[Tensor, ...]]:
        calls.clear()
        torch.manual_seed(0)
        run(model, example)
        return [tuple(t.clone() for t in call) for call in calls]

    right, wrong = 0, []
    with mock.patch.object(F, "scaled_dot_product_attention", captured):
        before = calls_of()
        if not before:
            return 0, []
        names = [n for n, u in found.items() if u and "product of activations" in why[n]]
        for name in names[:5]:
            weight = model.get_parameter(name)
            boxes = Division.of(found[name]).boxes(weight.shape)
            if len(boxes) < 2:
                continue
            for box in {boxes[0], boxes[len(boxes) // 2], boxes[-1]}:
                part = narrowed(weight.data, box)
                saved = part.clone()
                part += torch.rand_like(part)
                after = calls_of()
                part.copy_(saved)
                moved = [differ(*pair) for pair in zip(before, after, strict=True)]
                if True not in moved:
                    continue
                first = moved.index(True)
                old, new = heads_of(before, first), heads_of(after, first)
                changed = [
                    sum(not any(torch.equal(a, b) for b in now) for a in own)
                    for own, now in zip(old, new, strict=True)
                ]
                # In later layers' attention, all heads may change.
                full = [c == len(own) for c, own in zip(changed, old, strict=True)]
                parent = model.get_submodule(name.rsplit(".", 2)[0])
                normed = any(
                    "Norm" in type(m).__name__
                    and sum(p.numel() for p in m.parameters()) == len(weight)
                    for m in parent.children()
                )
                if sum(changed) == 1 or (normed and max(changed) == sum(changed)):
                    right += 1  # a norm over all heads makes each change affect all of them
                elif sum(full) < 2 or any(changed[i] and not full[i] for i in range(3)):
                    wrong.append(f"{name} {[*map(str, box)]}: changes {changed} heads")
    return right, wrong


def divisions(model: nn.Module, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the division of each weight, with None for AdamW, and the reasons why weights were
    refused."""
    refused: dict[str, str] = {}
    lines_of = mock.Mock(side_effect=lambda found: "\n".join(f"{n}: {p}" for n, p in found.items()))
    for _ in range(1000):
        try:
            with mock.patch("spectral.parameter_split.listed", lines_of):
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
            run(model, example)
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
        if (difference := step_difference(model, seen)) <= 1e-5:
            outcome["stepped as their pieces"].append(name)
        else:
            differences.append(f"{name}: a step differs by {difference} from those of the pieces")
        compared, others = compared_heads(model, example, seen, why)
        if compared and not others:
            outcome["a head a matrix"].append(name)
        differences += [f"{name}: {line}" for line in others]
        for line in others:
            print("     ", line, flush=True)
    differences = [d for d in differences if not any(re.match(key, d) for key in ACCEPTED)]
    for kind, names in outcome.items():
        print(f"{library}: {len(names)} {kind}: {'; '.join(names)}")
    assert not differences
    assert only or len(outcome["a head a matrix"]) >= CAPTURED_AT_LEAST.get(library, 0)
