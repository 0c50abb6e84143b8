"""In whole runs of one process, monitors do not affect training and write one line per step."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spectral import measures
from tests.live_bytes import peak_bytes
from tests.matrices import stable_rank
from tests.run_configs import MIXTURE, RULES, tiny_config
from tests.run_results import json_lines, state_of
from tests.step_trace import without_eigensolvers
from tests.tiny_families import overrides, settings
from training.build import build_trainer
from training.config import Config
from training.data.build_data import build_data
from training.loop import Hooks, Loop
from training.monitor import update_history
from training.monitor.matrix_figures import is_figure
from training.monitor.monitors import REPORTED, LayerSampling
from training.monitor.update_history import UpdateHistory
from training.run import train
from training.step import Trainer


def losses(config: Config, world) -> list[float]:
    """Train a run, and return the loss of every step."""
    found: list[float] = []
    train(config, world, on_step=lambda _, result: found.append(result.loss.item()))
    return found


def lines(folder: str, name: str = "monitors.jsonl") -> list[dict]:
    """Return the lines of a .jsonl file of the run."""
    return json_lines(Path(folder) / "run" / name)


def test_a_run_is_bit_for_bit_the_same_with_monitors(folder, world):
    keys = {"train__exit_step": 4, "train__micro_batch": 4}
    curves = [
        losses(tiny_config(folder, "muon_sphere", monitors__interval=k, **keys), world)
        for k in (0, 1)
    ]
    assert curves[0] == curves[1]


ONE_LAYER = 1.001 * 4 * (3 * 64**2 + 96**2) / 2**30
"""Size of one layer's float32 Gram matrices in GiB, with some margin."""


def test_a_sampled_step_is_a_line_and_its_aggregates_are_metrics(folder, world):
    keys = {"monitors__interval": 2, "monitors__activation_gib": ONE_LAYER}
    config = tiny_config(folder, train__exit_step=5, train__micro_batch=8, **keys)
    train(config, world)
    found = lines(folder)
    assert [line["step"] for line in found] == [2, 4]
    measured = [{u["layer"] for u in line["units"].values() if "input_rms" in u} for line in found]
    assert measured == [{1, None}, {0, None}]  # in turn, and the head
    line = found[-1]
    assert line["tokens"] == 4 * 8 * 32
    gate = line["units"]["layers.1.gate"]
    assert (gate["role"], gate["layer"]) == ("gate", 1)
    assert gate["radius"] == pytest.approx(math.sqrt(96 / 64))
    assert gate["retraction_bias"] == pytest.approx(gate["tracked_norm"] / gate["radius"] - 1)
    assert len(gate["quantiles"]) == 11 and gate["quantiles"][-1] == gate["spectral_norm"]
    assert line["units"]["embedding"]["layer"] is None
    assert line["units"]["embedding"]["update_rms"] > 0
    metrics = {row["step"]: row for row in lines(folder, "metrics.jsonl")}
    assert sorted(metrics) == [2, 4, 5]  # the log's own interval is 5
    gates = [unit["stable_rank"] for unit in line["units"].values() if unit["role"] == "gate"]
    assert metrics[4]["monitor/stable_rank/gate"] == pytest.approx(sum(gates) / 2)
    layer = [u["condition_number"] for u in line["units"].values() if u["layer"] == 0]
    mean = line["layers"]["0"]["condition_number"]
    assert mean == pytest.approx(sum(layer) / len(layer))
    assert not any(key.startswith("monitor/") for key in metrics[5])


@pytest.mark.parametrize("together", range(1, 6))
def test_layers_are_measured_in_turn_within_the_memory(together: int, folder: str) -> None:
    gib = together * ONE_LAYER
    config = tiny_config(folder, model__layers=5, monitors__activation_gib=gib)
    rounds = math.ceil(5 / together)
    for interval in range(1, 7):
        sampling = LayerSampling(config, interval)
        chosen = [sampling.layers(interval * k) for k in range(1, 2 * rounds + 1)]
        assert max(map(len, chosen)) <= together
        for first in range(rounds + 1):
            turn = chosen[first : first + rounds]
            assert sorted(sum(turn, [])) == [0, 1, 2, 3, 4], interval


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"monitors__inspection_gib": 1e-6},  # one head at a time
        {"optimizer__qkv_units": "group"},
        {"pc__level": 4, "pc__blocks": "[q,o]"},
        {"pc__level": 4, "pc__blocks": "[q,o]", "pc__evaluator": "in_graph"},
        {**MIXTURE, "model__layers": 3},
    ],
    ids=str,
)
def test_condition_numbers_are_of_whole_matrices_of_which_each_weighs_the_same(keys, folder, world):
    """The heads of q, k and v are parts of one matrix each, while experts are several matrices with
    one role in one layer."""
    config = tiny_config(folder, "adamw", monitors__interval=1, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    logs: dict[tuple, float] = {}
    measure = trainer.monitors.after_backward

    def measured() -> None:  # at the same moment, between the forward pass and the step
        measure()
        logs.update(mean_logs(trainer))

    trainer.monitors.after_backward = measured
    found: list[dict] = []
    Loop(trainer, Hooks(report=lambda metrics, step: found.append(metrics))).step_and_report()
    name = "monitor/condition_number/geometric_mean"
    for group, roles in (("", None), ("/qkv", "qkv")):
        chosen = [log for (_, role), log in logs.items() if roles is None or role in roles]
        expected = math.exp(sum(chosen) / len(chosen))
        assert found[0][name + group] == pytest.approx(expected, rel=1e-4), group


def mean_logs(trainer: Trainer) -> dict[tuple, float]:
    """Return the mean logarithm of the condition numbers of all matrices with the same layer and
    role."""
    in_graph = {unit.name: weight for unit, weight, *_ in trainer.model.effective_in_graph()}
    parts: dict[tuple, list] = {}
    for unit in trainer.model.units:
        if unit.is_matrix and unit.layer is not None and unit.role != "router":
            weight = in_graph.get(unit.name, unit.view(trainer.model.parameters[unit.parameter]))
            parts.setdefault((unit.layer, unit.role), []).append(weight.detach().double())
    logs = {}
    for place, matrices in parts.items():
        if place[1] in ("q", "k", "v"):
            matrices = [torch.cat(matrices)]
        values = [torch.linalg.svdvals(matrix) for matrix in matrices]
        numbers = [v[0] / v[-math.ceil(len(v) / 10) :].mean() for v in values]
        logs[place] = sum(math.log(number) for number in numbers) / len(numbers)
    return logs


@pytest.mark.parametrize("depth", range(4))
def test_only_weights_of_compared_steps_are_kept(depth: int, monkeypatch) -> None:
    monkeypatch.setattr(update_history, "weights", lambda *_, **__: None)
    for interval in range(1, 6):
        history = UpdateHistory(SimpleNamespace(domains=[SimpleNamespace(assign=None)]), depth)
        for step in range(1, 12):
            left = -step % interval
            history.begin(left)
            kept = len(history.moments)
            assert kept <= depth and (left < depth or kept == 0), (interval, step)
            assert left > 0 or kept == min(step, depth), (interval, step)


PC = {"pc__level": 4}


@pytest.mark.parametrize(
    ("rule", "decay", "keys"),
    [
        ("muon", 2.0, {}),
        ("muon_sphere", 0.0, {}),
        ("adamw", 9.0, {}),
        ("muon", 2.0, PC),
        ("adamw", 9.0, PC | {"pc__evaluator": "in_graph"}),
    ],
)
def test_spectra_of_momentum_and_update_are_those_of_the_matrices(rule, decay, keys, folder, world):
    """Test the first of two warm-up steps. The update does not include weight decay. For PC layers,
    the spectra are those of W."""
    keys = {**keys, "monitors__interval": 1, "monitors__groups": "[spectra,updates]"}
    config = tiny_config(folder, rule, **keys, optimizer__matrix__weight_decay=decay)
    trainer = build_trainer(config, world, *build_data(config))
    found: list[dict] = []
    hooks = Hooks(record=lambda line, step: found.append(line))
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.model.parameters.items():

        def keep(grad, name=name):
            gradients[name] = gradients.get(name, 0) + grad.clone().double()

        parameter.register_hook(keep)
    units = [u for u in trainer.model.units if u.is_matrix and u.layer is not None]
    before = {u.name: matrix(trainer, u).clone() for u in units}
    Loop(trainer, hooks).step_and_report()
    for unit in units:
        record = found[0]["units"][unit.name]
        update = matrix(trainer, unit) - (1 - RULES[rule] / 2 * decay) * before[unit.name]
        rms = update.square().mean().sqrt().item()
        assert record["applied_rms"] == pytest.approx(rms, rel=1e-4)
        close = {"rel": 1e-4, "abs": 1e-3 * torch.linalg.matrix_norm(update, 2).item()}
        assert record["update_quantiles"] == pytest.approx(deciles_of(update), **close)
        # The first momentum is a multiple of the gradient.
        gradient = deciles_of(
            kept_of_pc_layers(trainer, "momentum").get(
                unit.name, unit.view(gradients[unit.parameter])
            )
        )
        momentum = record["momentum_quantiles"]
        scaled = [value / momentum[-1] for value in momentum]
        assert scaled == pytest.approx([value / gradient[-1] for value in gradient], abs=1e-4)
    next(iter(trainer.model.parameters.values())).register_hook(lambda grad: grad * torch.inf)
    Loop(trainer, hooks).step_and_report()  # is skipped
    assert {found[1]["units"][unit.name]["applied_rms"] for unit in units} == {0}


def kept_of_pc_layers(trainer: Trainer, name: str) -> dict[str, torch.Tensor]:
    """Return W, or an entry of the state, for each PC layer that is updated by its owner."""
    kept = {}
    for stack in trainer.optimizer.materialized:
        values = stack.weight if name == "weight" else stack.state[name]
        kept |= zip([unit.name for unit in stack.units], values, strict=True)
    return kept


def matrix(trainer: Trainer, unit) -> torch.Tensor:
    """Return the current weight that the optimizer updates for a unit, in float64."""
    parameter = unit.view(trainer.model.parameters[unit.parameter])
    return kept_of_pc_layers(trainer, "weight").get(unit.name, parameter).detach().double()


def deciles_of(weight: torch.Tensor) -> list[float]:
    """Return the deciles of the singular values of a matrix."""
    return np.quantile(torch.linalg.svdvals(weight).numpy(), np.linspace(0, 1, 11)).tolist()


def test_noise_is_that_of_the_gradients_of_micro_batches(folder, world):
    keys = {"monitors__interval": 1, "monitors__groups": "[noise]", "monitors__noise_samples": 3}
    config = tiny_config(folder, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    found: list[dict] = []
    hooks = Hooks(record=lambda line, step: found.append(line))
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, parameter in trainer.model.parameters.items():
        kept = gradients.setdefault(name, [])
        add = type(parameter.main_grad).clone
        parameter.register_hook(lambda grad, kept=kept, add=add: kept.append(add(grad)))
    Loop(trainer, hooks).step_and_report()
    for unit in trainer.model.units:
        if unit.is_matrix:
            samples = torch.stack([unit.view(g).double() for g in gradients[unit.parameter]])
            assert len(samples) == 4
            flat = samples[:3].flatten(1)
            expected = measures.noise_of(flat @ flat.mT)
            record = found[0]["units"][unit.name]
            assert record["noise_samples"] == 3
            for figure in ("snr", "signal_share", "top_share"):
                value = getattr(expected, figure).item()
                # The signal is the difference of two nearly equal numbers.
                close = pytest.approx(value, rel=1e-4, abs=1e-6)
                assert record[f"gradient_{figure}"] == close, (unit.name, figure)


def test_alignment_is_that_of_the_gradients_of_successive_steps(folder, world):
    """The buffers no longer contain the gradients of the first step, because the second step
    overwrites them."""
    config = tiny_config(folder, "muon", monitors__interval=2, monitors__groups="[gradients]")
    trainer = build_trainer(config, world, *build_data(config))
    found: list[dict] = []
    hooks = Hooks(record=lambda line, step: found.append(line["units"]))
    steps: list[dict[str, torch.Tensor]] = []
    measure = trainer.monitors.after_backward

    def after_backward() -> None:  # before clipping
        parameters = trainer.model.parameters.items()
        steps.append({name: p.main_grad.double().clone() for name, p in parameters})
        measure()

    trainer.monitors.after_backward = after_backward
    for _ in range(2):
        Loop(trainer, hooks).step_and_report()
    (units,) = found
    checked = [unit for unit in trainer.model.units if unit.is_matrix]
    for unit in checked:
        a, b = (unit.view(step[unit.parameter]).flatten() for step in steps)
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        record = units[unit.name]["gradient_alignment"]
        assert record == pytest.approx(cosine, rel=1e-5, abs=1e-7), unit.name
        assert abs(record) < 0.99
    assert len(checked) > 10


@pytest.mark.parametrize(
    ("rule", "keys", "figures_of_rule"),
    [
        ("spectral_sphere", {}, {"multiplier", "multiplier_residual", "msign_evaluations"}),
        ("muon_plus_plus", {}, {"gap_exceeded"}),
        ("muon", {"pc__level": 2}, {"gamma"}),
    ],
)
def test_what_rules_report_is_that_of_their_step(folder, world, rule, keys, figures_of_rule):
    config = tiny_config(folder, rule, monitors__interval=1, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    found: list[dict] = []
    hooks = Hooks(record=lambda line, step: found.append(line["units"]))
    before = {
        unit.name: unit.view(trainer.model.parameters[unit.parameter]).detach().clone()
        for unit in trainer.model.units
    }
    Loop(trainer, hooks).step_and_report()
    (units,) = found
    reported = set()
    for batch in trainer.optimizer.stacks:
        for i, unit in enumerate(batch.units):
            for theirs, ours in REPORTED.items():
                if theirs in batch.report:
                    reported.add(ours)
                    assert units[unit.name][ours] == batch.report[theirs][i].item()
    assert figures_of_rule <= reported
    on_spheres = sum("radius_error" in record for record in units.values())
    assert on_spheres == (0 if rule == "muon" else 24)
    for name, record in units.items():
        if "radius_error" in record:
            sigma = np.linalg.svd(before[name].double().flatten(0, -2).numpy(), compute_uv=False)[0]
            assert record["radius_error"] == pytest.approx(sigma / record["radius"] - 1, abs=1e-9)
    # AdamW's first step is the sign of the gradient; rows of absent tokens have none.
    gradient = trainer.model.parameters["embedding"].main_grad
    share = (gradient != 0).double().mean().item()
    assert units["embedding"]["update_rms"] == pytest.approx(share**0.5, rel=1e-3)


MOE = {**MIXTURE, "model__moe__shared_experts": 1}
PLACES = {
    "self_attention.linear_qkv": ("q.1", "k.0", "v.1"),
    "self_attention.linear_proj": ("o",),
    "self_attention.q_a": ("q_a",),
    "self_attention.q_b": ("q_b.0",),
    "self_attention.kv_b": ("k_b.1", "v_b.0"),
    "mlp.linear_fc1": ("gate", "up"),
    "mlp.linear_fc2": ("down",),
    "mlp.router": ("router",),
    "mlp.shared_experts.linear_fc1": ("shared.gate",),
    "mlp.experts.local_experts.2.linear_fc1": ("experts.2.gate", "experts.2.up"),
    "mlp.experts.local_experts.2.linear_fc2": ("experts.2.down",),
}
"""Maps the modules of a layer to the units of their weights."""


# torch.compile reads the gradient of every input, also of non-leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "keys",
    [
        {"train__compile": "aot_eager"},
        {"train__recompute": "full"},
        MOE,
        overrides(settings("deepseek")),
    ],
    ids=["compiled llama", "recomputed", "experts", "latent"],
)
def test_activations_are_those_that_the_weights_multiply(folder, world, keys):
    config = tiny_config(folder, "muon", monitors__interval=1, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    lines: list[dict] = []
    hooks = Hooks(record=lambda line, step: lines.append(line))
    inputs: dict[str, list] = {}
    outputs: dict[str, list] = {}

    def watch(name, module):
        def before(module, args, kwargs):
            if torch.is_grad_enabled():
                given = [x for x in (*args, *kwargs.values())[:2] if isinstance(x, torch.Tensor)]
                inputs.setdefault(name, []).append([x.detach().clone() for x in given])

        def after(module, args, output):
            if torch.is_grad_enabled():
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, torch.Tensor):
                    outputs.setdefault(name, []).append(output.detach().clone())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    (chunk,) = trainer.model.chunks
    for name, module in chunk.named_modules():
        watch(name, module)
    tokens = next(build_trainer(config, world, *build_data(config)).batches)
    Loop(trainer, hooks).step_and_report()
    units = lines[0]["units"]

    def flat(kept: list) -> torch.Tensor:
        return torch.cat([x.reshape(-1, x.shape[-1]) for x in kept])

    seen = 0
    for module, names in PLACES.items():
        for layer in (0, 1):
            place = f"decoder.layers.{layer}.{module}"
            for unit in names if place in inputs else ():
                a = flat([kept[0] for kept in inputs[place]])
                record = units[f"layers.{layer}.{unit}"]
                figure = "own_input_stable_rank" if unit == "o" else "input_stable_rank"
                # Gram matrices are float32: errors of 1e-7 of the largest eigenvalue.
                assert record[figure] == pytest.approx(stable_rank(a), rel=1e-4), (place, unit)
                rms = a.double().square().mean().sqrt().item()
                assert record["input_rms"] == pytest.approx(rms, rel=1e-5)
                ratio = record["gradient_nuclear_rank"] / record["input_stable_rank"]
                assert record["criterion_ratio"] == pytest.approx(ratio)
                if unit.endswith(("gate", "up")):
                    both = flat(outputs[place]).chunk(2, -1)
                    before = stable_rank(both[unit.endswith("up")])
                    assert record["output_stable_rank"] == pytest.approx(before, rel=1e-4)
                seen += 1
    assert seen >= 12
    attention = units["layers.1.q.0" if "layers.1.q.0" in units else "layers.1.q_a"]
    assert units["layers.1.o"]["input_stable_rank"] == attention["input_stable_rank"]
    head = flat([kept[0] for kept in inputs["output_layer"]])
    assert units["head"]["input_stable_rank"] == pytest.approx(stable_rank(head), rel=1e-4)
    counts = torch.bincount(torch.cat([kept[0].flatten() for kept in inputs["embedding"]]))
    frequent = counts.sum().item() / counts.max().item()
    assert tokens.shape == (2, 33)  # of four micro-batches
    assert units["embedding"]["input_stable_rank"] == pytest.approx(frequent)
    for layer in (0, 1):
        block = lines[0]["blocks"][str(layer)]
        place = f"decoder.layers.{layer}"
        for name, found in {
            "residual": outputs[place],
            "attention_output": outputs[f"{place}.self_attention"],
            "ffn_output": outputs[f"{place}.mlp"],
            # Compiled norms are called on the terms of the preceding sum.
            "residual_after_attention": [
                k[0] for k in inputs[f"{place}.pre_mlp_layernorm"] if len(k) == 1
            ],
        }.items():
            entries = torch.cat([x.flatten() for x in found]).double()
            assert block[f"{name}_rms"] == pytest.approx(entries.square().mean().sqrt().item())
            assert block[f"{name}_absmax"] == entries.abs().max().item()
        core = inputs[f"{place}.self_attention.core_attention"]
        assert block["max_attention_logit"] == pytest.approx(max(map(logit, core)), rel=1e-5)
    assert lines[0]["blocks"]["embedding"]["residual_rms"] > 0
    if "model__moe__experts" in keys:
        places = [f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1" for e in range(4)]
        counts = [sum(len(kept[0]) for kept in inputs.get(place, [])) for place in places]
        assert sum(counts) == 2 * 8 * 32  # two experts per token
        assert lines[0]["blocks"]["1"]["maxvio"] == pytest.approx(max(counts) / (2 * 64) - 1)
        assert "maxvio" not in lines[0]["blocks"]["0"]


def logit(kept: list) -> float:
    """Return the largest causal attention score for the queries and keys `[s, b, heads, d]` of one
    micro-batch."""
    q, k = (x.double() for x in kept)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
    return scores.masked_fill(~torch.ones_like(scores).tril().bool(), -math.inf).max().item()


@pytest.mark.parametrize("evaluator", ["materialized", "in_graph"])
def test_the_norm_that_pc_layers_track_has_the_error_that_an_svd_finds(evaluator, folder, world):
    """The reference uses u, v and W as saved at the end of the previous step."""
    config = tiny_config(
        folder,
        "adamw",
        pc__level=4,
        pc__steps=1,
        pc__evaluator=evaluator,
        monitors__interval=4,
        monitors__groups=["weights"],
        checkpoint__interval=3,
        train__exit_step=4,
        train__micro_batch=8,
    )
    with without_eigensolvers():  # the norm of this has no error
        train(config, world)
    saved = state_of(Path(folder) / "run", 3)
    (line,) = lines(folder)
    seen = {name: unit for name, unit in line["units"].items() if "pc_norm_error" in unit}
    assert {unit["role"] for unit in seen.values()} == {"o", "gate", "up", "down"}
    for name, unit in seen.items():
        w, u, v = (
            saved[f"{kind}{name}{end}"].double().numpy()
            for kind, end in (("weight/", ""), ("pc/", "/u"), ("pc/", "/v"))
        )
        tracked = u.ravel() @ w.reshape(u.size, v.size) @ v.ravel()
        exact = np.linalg.norm(w.reshape(u.size, v.size), 2)
        # A float32 sum of squares.
        assert unit["pc_tracked_norm"] == pytest.approx(tracked, rel=1e-6)
        assert unit["pc_norm_error"] == pytest.approx(1 - tracked / exact, abs=2e-6)
        if evaluator == "in_graph":  # a materialized layer reports gamma after the step
            assert unit["gamma"] == saved[f"weight/{name}.gamma"].item()
    worst = max(unit["pc_norm_error"] for unit in seen.values())
    assert worst > 1e-4  # a single iteration
    (metrics,) = [row for row in lines(folder, "metrics.jsonl") if row["step"] == 4]
    assert metrics["monitor/pc_norm_error/max"] == worst


# Short sequences make inspection need more memory than forward and backward.
SMALL = {"train__sequence_length": 16, "train__micro_batch": 1, "train__global_batch": 4}
# Otherwise an optimizer step's buffers exceed the monitors' memory for this small model.
FEW_BUFFERS = {"optimizer__distributed__step_groups": 4}
SINGLE = {"monitors__inspection_gib": 1e-9}


def test_a_budget_spreads_inspection_over_rounds(folder, world):
    """All metrics equal those of a joint inspection, but take less memory."""
    found, peaks = [], []
    for keys in ({}, {"monitors__inspection_gib": 3e-4}, SINGLE):
        config = tiny_config(folder, "muon", monitors__interval=2, **SMALL, **FEW_BUFFERS, **keys)
        trainer = build_trainer(config, world, *build_data(config))
        lines: list[dict] = []
        hooks = Hooks(record=lambda line, step, lines=lines: lines.append(line["units"]))
        loop = Loop(trainer, hooks)
        peaks.append(peak_bytes(lambda loop=loop: [loop.step_and_report() for _ in range(2)]))
        found.append(lines[0])
    assert peaks[0] > peaks[2]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, record in other.items():
            for figure, value in found[0][name].items():
                if is_figure(figure, value):  # float64 sums in another order
                    close = pytest.approx(value, rel=1e-9, abs=1e-12)
                    assert record[figure] == close, (name, figure)
