"""Layouts that do not fit the model, and sections that contradict each other, are rejected before
any rank starts, and the error states the reason."""

import pytest

from tests.minimal_config import problems
from training.config import check, load_config

MIXTURE = ["model.family=moe", "model.moe={experts: 6, top_k: 2, expert_ffn: 16}"]
SHARED = "{experts: 6, top_k: 2, expert_ffn: 5, shared_experts: 1}"
FLASH = "model.attention_kernel=flash_attention_3"
SHARDWISE = "optimizer.distributed.tensor_mode=shardwise"
REFUSED = [
    (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline = 2 requires pipeline > 1"),
    (["parallel.sequence=true"], "parallel.sequence = true requires tensor > 1"),
    (["parallel.tensor=4", "model.kv_heads=2"], "model.kv_heads must be divisible by"),
    (["parallel.tensor=64"], "model.ffn must be divisible by parallel.tensor = 64"),
    (["parallel.tensor=64"], "train.sequence_length must be divisible by 64 for parallel.context"),
    (["parallel.pipeline=3"], "model.layers must be divisible by parallel.pipeline"),
    (["parallel={pipeline: 2, virtual_pipeline: 4}"], "model.layers must be divisible by"),
    (["parallel.expert_tensor=2"], "parallel.expert_tensor must be 1 for model.family llama"),
    ([*MIXTURE, "parallel.expert_tensor=3"], "model.moe.expert_ffn must be divisible by"),
    (
        [*MIXTURE, f"model.moe={SHARED}", "parallel.tensor=2"],
        "model.moe.shared_experts * model.moe.expert_ffn must be divisible by parallel.tensor = 2",
    ),
    (["parallel.context=3"], "train.sequence_length must be divisible by 6 for parallel.context"),
    (["parallel={pipeline: 2, first_stage_layers: 0}"], "parallel.first_stage_layers must be at"),
    (["parallel.last_stage_layers=1"], "parallel.last_stage_layers = 1 requires pipeline > 1"),
    (
        ["parallel={pipeline: 2, virtual_pipeline: 2, first_stage_layers: 1}"],
        "parallel.first_stage_layers = 1 requires virtual_pipeline = 1",
    ),
    (
        ["parallel={pipeline: 3, first_stage_layers: 1}"],
        "model.layers must leave the same number of layers, at least one, for each of the 2 "
        "remaining stages, given parallel.first_stage_layers = 1, got",
    ),
    (
        ["parallel={pipeline: 2, first_stage_layers: 2, last_stage_layers: 1}"],
        "model.layers must be parallel.first_stage_layers + last_stage_layers = 3",
    ),
    (
        ["parallel={pipeline: 2, first_stage_layers: 4}"],
        "at least one layer for the remaining stage, given parallel.first_stage_layers = 4, got",
    ),
    (["train.fp8=hybrid"], "train.fp8 = 'hybrid' requires precision bf16"),
    (
        ["train.precision=bf16", "train.fp8=e4m3"],
        "train.fp8 = 'e4m3' requires model.attention_backend",
    ),
    ([FLASH], "= 'flash_attention_3' requires train.precision bf16"),
    (
        [FLASH, "data.document_mask=true"],
        "data.document_mask = true requires model.attention_kernel auto",
    ),
    ([*MIXTURE, "train.recompute=selective"], "train.recompute must be none or full if every"),
    (["checkpoint.interval=0", "spikes.rewinds=1"], "spikes.rewinds must be 0 with checkpoint."),
    (
        ["validation={samples_interval: 1, samples_tokens: 17}"],
        "validation.samples_tokens must be at most 16, the number of tokens left after the prompt "
        "in a sequence of 32 tokens, got 17",
    ),
    (["tasks.files={a/b: x}"], "tasks.files must use only letters"),
    (["pc={}", "checkpoint.initialize_from=a"], "checkpoint.initialize_from must be null with PC"),
    (["pc={}", SHARDWISE], "tensor_mode must be owner with PC layers, got 'shardwise'"),
    (["gram_penalty={}", SHARDWISE], "tensor_mode must be owner with gram_penalty"),
    (["gram_penalty.roles=[gain]"], "gram_penalty.roles must name one of q, k, v, o, gate"),
    (
        ["gram_penalty={}", "pc={evaluator: in_graph, blocks: [q, o]}"],
        "pc.evaluator must be materialized for PC layers in gram_penalty.roles, got in_graph for o",
    ),
    (
        ["pc.evaluator=in_graph", "model.attention_backend=transformer_engine"],
        "pc.evaluator must be materialized with model.attention_backend transformer_engine",
    ),
    (
        [
            "optimizer={distributed: {cuda_graph: true, overlap_gather: false},"
            " rules: {spectral_sphere: {early_exit: true}}}"
        ],
        "rules.spectral_sphere.early_exit must be false with distributed.cuda_graph",
    ),
    (
        ["data.document_mask=true", "model.attention_backend=transformer_engine"],
        "data.document_mask = true requires model.attention_backend",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "world_size", "problem"),
    [
        *((overrides, None, problem) for overrides, problem in REFUSED),
        ([], 3, "train.micro_batch times the data-parallel size = 2 * 3 = 6, got 8"),
        (["parallel.tensor=2", "parallel.pipeline=2"], 6, "2 * 2 * 1 = 4, got 6"),
        (["train.micro_batch=3"], 1, "train.global_batch must be divisible by"),
        (["model.vocab_size=100", "model.vocab_multiple=1", "parallel.tensor=8"], 8, "got 100"),
        ([*MIXTURE, "parallel.expert=3"], 4, "parallel.expert * expert_tensor = 3 * 1 = 3, got 4"),
        ([*MIXTURE, "parallel={pipeline: 2, expert: 3, expert_tensor: 4}"], 12, "= 12, got 6"),
        (
            [
                "parallel={pipeline: 4, virtual_pipeline: 2}",
                "model.layers=8",
                "train.global_batch=12",
            ],
            4,
            "train.global_batch must yield a number of micro-batches divisible by "
            "parallel.pipeline = 4",
        ),
    ],
)
def test_a_layout_is_refused_with_the_reason(minimal, overrides, world_size, problem) -> None:
    assert any(problem in line for line in problems(minimal, *overrides, world_size=world_size))


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], 4),
        (["parallel.tensor=2", "parallel.pipeline=2"], 8),
        (["parallel.tensor=2", "model.vocab_size=257"], 2),
        (["parallel={tensor: 2, sequence: false}", "train.sequence_length=33"], 2),
        (["parallel={pipeline: 2, first_stage_layers: 1}"], 2),
        (["parallel={pipeline: 2, first_stage_layers: 1, last_stage_layers: 3}"], 2),
        (["parallel={pipeline: 3, first_stage_layers: 1, last_stage_layers: 1}"], 3),
        ([*MIXTURE, "parallel={expert: 2, tensor: 2}"], 2),
        ([*MIXTURE, "parallel={expert: 2, expert_tensor: 2}"], 4),
    ],
)
def test_layouts_that_fit(minimal, overrides: list[str], world_size: int) -> None:
    check(load_config(minimal, overrides), world_size)


def test_routers_are_adamw_unless_said_otherwise(minimal) -> None:
    optimizer = load_config(minimal, MIXTURE).optimizer
    assert optimizer.settings_for("router").rule == "adamw"
    assert optimizer.settings_for("router").lr == optimizer.matrix.lr
    assert optimizer.settings_for("expert_up").rule == "spectral_sphere"
    sphere = [*MIXTURE, "optimizer.roles.router.rule=spectral_sphere"]
    assert load_config(minimal, sphere).optimizer.settings_for("router").rule == "spectral_sphere"


def test_illegal_counts_come_with_the_nearest_legal_ones(root) -> None:
    config = load_config(root / "configs" / "llama1b_sso.yaml")
    with pytest.raises(ValueError) as caught:
        check(config, 64)
    assert str(caught.value).endswith(
        "= 4 * 64 = 256, got 320; nearest valid values: numbers of ranks 40 and 80; "
        "train.micro_batch 1 and 5; train.global_batch 256 and 512"
    )
    for ranks in (40, 80):
        check(config, ranks)
    for key in ("micro_batch=1", "micro_batch=5", "global_batch=256", "global_batch=512"):
        check(load_config(root / "configs" / "llama1b_sso.yaml", [f"train.{key}"]), 64)
