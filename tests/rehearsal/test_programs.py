"""Families, rules and options on one rank run with ordered accesses and without host syncs."""

import pytest

from tests.rehearsal.programs import ALLOWED_READS, MONITORED, program, sound
from tests.slow_cases import slow_but
from tests.tiny_families import SETTINGS
from training.rehearsal.rank import PLAIN_STEP

# Two ranks share the optimizer's work.
WORLD = 2


def plain(report, name):
    """Return the counts for one part of a plain step."""
    return report.counts[PLAIN_STEP, name]


QUICK = {"adamw", "spectral_sphere", "PC layers of gemma2"}
"""Families, rules and options that no other test covers. The tests of all others are slow."""


@pytest.mark.parametrize("family", slow_but(QUICK, SETTINGS))
def test_every_family_is_rehearsed(family, perform, tmp_path):
    sound(perform, program(tmp_path, WORLD, family, **MONITORED), WORLD)


LAUNCHES = {
    "adamw": 36,
    "muon": 163,
    "muon_sphere": 378,
    "spectral_sphere": 541,
    "muon_plus_plus": 773,
}
"""Maximum number of launches per step for each rule on a tiny Llama: 10% above the current number.
More launches would slow down steps of small matrices."""
PASSES = 410
"""Number of launches in the forward and backward passes of two layers for two micro-batches."""


@pytest.mark.parametrize("rule", slow_but(QUICK, LAUNCHES))
def test_every_rule_is_rehearsed_within_its_launches(rule, perform, tmp_path):
    report = sound(perform, program(tmp_path, WORLD, rule=rule), WORLD)
    assert plain(report, "optimizer").launches <= LAUNCHES[rule]
    assert plain(report, "forward_backward").launches <= PASSES


WIDE = {
    "model__layers": 1, "model__hidden": 1024, "model__ffn": 2816, "model__heads": 4,
    "model__head_dim": 64, "checkpoint__interval": 0,
}  # fmt: skip


def test_side_streams_keep_no_pool_for_stacks_that_fill_the_device(perform, tmp_path):
    report = sound(perform, program(tmp_path, 1, **WIDE), 1)
    heads = 4 * 12 * 64 * 1024  # bytes of q, k and v, in float32
    assert heads < report.side_pools < 10 * heads
    # The three matrices of the feed-forward block alone take more.
    assert report.side_pools < 4 * 3 * WIDE["model__hidden"] * WIDE["model__ffn"]


PC = {"pc__level": 2}
OPTIONS = {
    "watched weights": {"watchdog__replica_interval": 2, "train__precision": "bf16"},
    "loss chunks": {"train__loss_chunk": 40},
    "tasks": {"tasks__files__made": "made.jsonl", "parallel__pipeline": 2},
    "z-loss": {"train__z_loss": 1e-4, "parallel__tensor": 2},
    "recompute full": {"train__recompute": "full"},
    "recompute selective": {"train__recompute": "selective"},
    "compiled": {"train__compile": "inductor"},
    "PC layers": PC,
    "PC layers of gemma2": {"family": "gemma2", **PC},
    "Gram penalty": {"gram_penalty__coefficient": 0.001, "gram_penalty__horizon": 1.0},
    "PC layers in the graph": {**PC, "pc__evaluator": "in_graph"},
}


@pytest.mark.parametrize("option", slow_but(QUICK, OPTIONS))
def test_every_option_is_rehearsed(option, perform, tmp_path):
    sound(perform, program(tmp_path, WORLD, **MONITORED | OPTIONS[option]), WORLD)


def test_compiled_parts_are_one_kernel_forward_and_few_backward(perform, tmp_path):
    one_batch = {"train__global_batch": WORLD}
    programs = (
        program(tmp_path, WORLD, train__compile=how, train__fused_backward=kernels, **one_batch)
        for how, kernels in (("null", "null"), ("auto", "null"), ("auto", "auto"))
    )
    reports = [sound(perform, made, WORLD) for made in programs]
    single, compiled, ours = (plain(report, "forward_backward") for report in reports)
    calls = 2 * reports[0].scenario.rehearsed  # of two layers
    assert single.kernels["silu"] == calls
    assert compiled.kernels["silu"] == compiled.kernels["_fused_rms_norm"] == 0
    passes = reports[0].scenario.rehearsed
    for forward, backward, count in (
        ("swiglu", "swiglu_backward", calls),
        ("turned_heads", "heads_gradients", calls),
        ("rms_norm", "rms_norm_backward", 2 * passes),  # the first and the last layer
        ("normed_sum", "sum_gradients", 3 * passes),
    ):
        names = f"compiled_{forward}", f"compiled_{backward}"
        assert [compiled.kernels[name] for name in names] == [count, count]
    assert compiled.kernels["cat"] < calls
    assert compiled.launches < single.launches and compiled.kernel_seconds < single.kernel_seconds
    # In compiled code, the gradients of gate and up both read the gate and the result's gradient.
    assert ours.kernels["gated_kernel"] == ours.kernels["heads_kernel"] == calls
    train, ffn = reports[0].scenario.config.train, reports[0].scenario.config.model.ffn
    size = train.micro_batch * train.sequence_length * ffn * 2  # bytes in 16 bits
    assert compiled.elementwise_bytes - ours.elementwise_bytes == calls * 2 * size
    assert compiled.launches == ours.launches


@pytest.mark.slow
def test_ligers_loss_is_a_kernel_forward_and_one_backward(perform, tmp_path):
    reports = [
        sound(perform, program(tmp_path, WORLD, train__fused_loss=how), WORLD)
        for how in ("null", "auto")
    ]
    engine, liger = (plain(report, "forward_backward") for report in reports)
    calls = reports[0].scenario.rehearsed
    for part in ("forward", "backward"):
        name = f"liger_vocab_parallel_ce_{part}_kernel"
        assert (engine.kernels[name], liger.kernels[name]) == (0, calls)
    assert liger.launches < engine.launches


@pytest.mark.parametrize(
    ("backend", "reads"), slow_but([("grouped", 0)], [("grouped", 0), ("sequential", 1)])
)
def test_mixtures_read_no_more_than_is_listed(backend, reads, perform, tmp_path):
    """Megatron's own dispatcher would wait for the device three times per layer and pass."""
    config = program(tmp_path, 1, "moe", model__moe__backend=backend)
    report = sound(perform, config, 1)
    found = plain(report, "forward_backward").host_reads
    passes = config.train.global_batch // config.train.micro_batch
    mixed = config.model.layers - config.model.moe.dense_layers
    assert sum(found.values()) == reads * mixed * report.scenario.rehearsed <= passes * mixed
    assert all(place.startswith(tuple(ALLOWED_READS)) for place in found)


def test_a_graph_launches_the_step_once(perform, tmp_path):
    graph = {"cuda_graph": True, "overlap_gather": False}
    keys = {f"optimizer__distributed__{key}": value for key, value in graph.items()}
    report = sound(perform, program(tmp_path, WORLD, **keys), WORLD)
    last = max(step for step, name in report.counts if name == "optimizer")
    assert report.counts[last, "optimizer"].kernels["graph"] >= 1
