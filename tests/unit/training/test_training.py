"""Whole runs in one process: output, determinism, and handling of bad steps."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.layout import Layout
from parallel.comm import groups as process_groups
from tests.run_configs import read_config, tiny_config
from tests.run_results import json_lines
from training import evaluation
from training.build import build_trainer
from training.config import group_of, load_config
from training.config.binding import bind
from training.config.optimizer_section import GROUPS
from training.data.batches import as_batch
from training.data.build_data import build_data
from training.data.order import Progress
from training.loop import Hooks, Loop
from training.nonfinite import NonFiniteError
from training.run import train


def lines(folder: str, name: str) -> list[dict]:
    """Return the objects of a .jsonl file of the run."""
    return json_lines(Path(folder) / "run" / name)


@pytest.mark.parametrize("who", ["TORCHELASTIC", pytest.param("SLURM", marks=pytest.mark.slow)])
def test_a_restart_does_not_start_over_again(who, folder, world, monkeypatch, capsys):
    """`--resume none` applies to the first start of each command. SLURM's id identifies a job,
    while torchrun's id differs at each start."""
    keys = {"log__interval": 1, "checkpoint__interval": 2, "train__micro_batch": 8}

    def start(command: str, restarts: int, exit_step: int) -> list[int]:
        if who == "SLURM":
            monkeypatch.setenv("SLURM_JOB_ID", command)
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"start {restarts}")
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", command)
        monkeypatch.setenv(f"{who}_RESTART_COUNT", str(restarts))
        train(read_config(folder, **keys, train__exit_step=exit_step), world, resume="none")
        return [line["step"] for line in lines(folder, "metrics.jsonl")]

    tiny_config(folder, "adamw")
    aside = Path(folder) / "run" / "checkpoints-aside"
    assert start("a", 0, 2) == [1, 2] and not aside.exists()
    assert "applied at the first start" not in capsys.readouterr().out
    assert start("a", 1, 4) == [1, 2, 3, 4] and not aside.exists()
    assert "--resume none was applied at the first start" in capsys.readouterr().out
    assert start("a", 2, 6) == [1, 2, 3, 4, 5, 6] and not aside.exists()
    assert start("b", 1, 2) == [1, 2] and aside.exists()


@pytest.mark.parametrize(("interval", "chosen"), [("null", 100), ("2", 2), ("0", 0)])
def test_a_run_says_how_often_it_is_monitored(interval, chosen, folder, world, capsys):
    """The run prints the interval in its first lines. It also records the interval as a number in
    its events, which is used to verify a log. An interval longer than the run is reported."""
    keys = {"monitors__interval": interval, "train__steps": 2, "schedule__warmup_steps": 0}
    train(tiny_config(folder, "adamw", **keys), world)
    started = lines(folder, "events.jsonl")[0]
    assert started["intervals"]["monitors"] == chosen
    printed = capsys.readouterr().out
    assert ("monitors: every 2 steps" in printed) == (chosen == 2)
    assert ("no step is monitored: the first would be 100" in printed) == (chosen == 100)


def test_a_run_writes_its_config_routing_data_and_metrics(folder, world, capsys):
    config = tiny_config(folder, train__steps=10)
    train(config, world)
    assert load_config(Path(folder) / "run" / "config.yaml") == config
    routes = lines(folder, "routing.jsonl")
    assert len(routes) == 2 * (4 + 2 + 2 + 1 + 3 + 2) + 3
    gate = next(row for row in routes if row["unit"] == "layers.1.gate")
    assert gate["rule"] == "spectral_sphere" and gate["shape"] == [96, 64]
    assert gate["owner"] == "rank 0"
    assert gate["radius"] == gate["scale"] == pytest.approx(math.sqrt(96 / 64))
    metrics = lines(folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [5, 10]
    assert metrics[-1]["progress/tokens"] == 10 * 8 * 32
    assert {"train/loss", "lr/matrix", "optim/grad_norm", "val/walk/bpb"} - metrics[-1].keys() == {
        "val/walk/bpb"  # no manifest next to the token set, so the bytes of its text are unknown
    }
    printed = capsys.readouterr().out
    assert "step 10/10 | loss" in printed and "its unigram entropy" in printed
    assert (
        "data: token sets not verified, because no manifest.json contains their hashes: train.walk"
        in printed
    )


def test_files_of_the_user_in_the_run_folder_are_renamed(folder, world, capsys):
    """A config.yaml written by the user may set `run.dir` to its own folder."""
    config = tiny_config(folder, "adamw", train__steps=2, schedule__warmup_steps=0)
    run = Path(folder) / "run"
    run.mkdir()
    own = {"config": ("yaml", "base: ../config.yaml\n"), "data": ("json", '{"text": "own"}\n')}
    for name, (suffix, text) in own.items():
        (run / f"{name}.{suffix}").write_text(text)
    for start in range(2):
        train(config, world, resume="none")
        said = "renamed existing files: config.yaml to config.1.yaml, data.json to data.1.json"
        assert (said in capsys.readouterr().out) == (start == 0)
    for name, (suffix, text) in own.items():
        assert (run / f"{name}.1.{suffix}").read_text() == text
        assert not (run / f"{name}.2.{suffix}").exists()
    assert load_config(run / "config.yaml") == config


@pytest.mark.parametrize("steps", [0, 3])
def test_a_role_begins_and_stays_on_the_sphere_of_its_own_radius(steps, folder, world, monkeypatch):
    monkeypatch.setattr("models.initialize.STACK", 3 * 16 * 64)  # three of the eight heads of q
    radii = {"q": 2.0, "down": 0.5}
    config = tiny_config(
        folder,
        optimizer__matrix__weight_decay=0.0,
        **{f"optimizer__roles__{role}__radius_scaler": scaler for role, scaler in radii.items()},
    )
    trainer = build_trainer(config, world, *build_data(config))
    for _ in range(steps):
        Loop(trainer).step_and_report()
    for unit in trainer.model.units:
        if group_of(unit.role) != "matrix":
            continue
        weight = unit.view(trainer.model.parameters[unit.parameter]).double()
        rows, cols = unit.shape
        radius = radii.get(unit.role, 1.0) * math.sqrt(rows / cols)
        # A step leaves the sphere to second order in its length.
        assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(
            radius, rel=0.01 if steps else 1e-6
        )


def test_validation_is_the_mean_over_every_window(folder, world):
    config = tiny_config(folder, validation__samples=7)
    data, (validation,) = build_data(config)
    trainer = build_trainer(config, world, data, [validation])
    batches = validation.batches(micro_batch=1, data_rank=0, data_size=1)
    module = trainer.model.chunks[0]
    losses = []
    with torch.no_grad():
        for window, _ in batches:
            tokens, labels = window[:, :-1], window[:, 1:]
            positions = torch.arange(tokens.shape[1])[None]
            losses.append(module(tokens, positions, None, labels=labels).double().mean().item())
    assert len(losses) == 7
    ours = Loop(trainer).evaluate()["val/walk/loss"]
    assert ours == pytest.approx(sum(losses) / 7, rel=1e-6)


def test_a_z_loss_is_a_figure_of_its_own(folder, world):
    """The z-loss changes the weights, but `train/loss` and the validation loss do not include
    it."""
    first, steps = {}, {}
    for z_loss in (0.0, 0.1):
        config = tiny_config(
            folder, "adamw", train__z_loss=z_loss, train__exit_step=2, log__interval=1
        )
        data, validation = build_data(config)
        trainer = build_trainer(config, world, data, validation)
        logits = torch.cat(
            [trainer.model.chunks[0](b["tokens"], None, None) for b in first_batches(trainer)]
        )
        square = logits.logsumexp(-1).square().mean().item()
        steps[z_loss] = {}
        report = Hooks(report=lambda m, step, found=steps[z_loss]: found.update({step: m}))
        loop = Loop(trainer, report)
        first[z_loss] = loop.evaluate()
        loop.run()
    plain, with_z = steps[0.0], steps[0.1]
    assert first[0.0] == first[0.1]
    assert with_z[1]["train/loss"] == plain[1]["train/loss"]
    assert with_z[1]["train/z_loss"] == pytest.approx(square, rel=1e-6)
    assert with_z[2]["train/loss"] != plain[2]["train/loss"]
    assert with_z[2]["train/z_loss"] < with_z[1]["train/z_loss"] and "train/z_loss" not in plain[1]


def first_batches(trainer):
    """Return the micro-batches of the first step."""
    batches = trainer.make_batches(Progress())
    return [
        as_batch(next(batches), trainer.groups, trainer.data.borders)
        for _ in range(trainer.microbatches)
    ]


def test_gradients_and_momentum_may_be_kept_in_16_bit(folder, world):
    curves = {}
    for dtype in ("fp32", "bf16"):
        losses: list[float] = []
        config = tiny_config(
            folder,
            "muon",
            optimizer__distributed__gradient_dtype=dtype,
            optimizer__distributed__momentum_dtype=dtype,
            train__exit_step=5,
        )
        train(config, world, on_step=lambda _, r, losses=losses: losses.append(r.loss.item()))
        curves[dtype] = losses
        trainer = build_trainer(config, world, *build_data(config))
        expected = torch.bfloat16 if dtype == "bf16" else torch.float32
        matrices = [
            r for d in trainer.optimizer.domains for r in d.regions if r.assigned.rule.whole_matrix
        ]
        assert {region.state["momentum"].dtype for region in matrices} == {expected}
        assert {g.dtype for d in trainer.model.domains for g in d.gradients} == {expected}
    # 8 bits of mantissa change a loss of about 4 in the third digit at most.
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=1e-2)
    assert curves["bf16"] != curves["fp32"]


def test_stages_deal_layers_in_order():
    interleaved = Layout(pipeline=2, virtual_pipeline=2)
    two = [process_groups.chunk_specs(8, interleaved, rank) for rank in range(2)]
    assert [stage.layers for stage in two[0]] == [(0, 1), (4, 5)]
    assert [stage.layers for stage in two[1]] == [(2, 3), (6, 7)]
    assert [stage.embedding for stage in two[0]] == [True, False]
    assert [stage.head for stage in two[1]] == [False, True]


def test_the_first_and_last_stage_may_have_fewer_layers():
    def layers(count, size, **ends):
        keys = {f"{end}_stage_layers": number for end, number in ends.items()}
        layout = Layout(pipeline=size, **keys)
        return [process_groups.chunk_specs(count, layout, rank) for rank in range(size)]

    four = layers(9, 4, first=2, last=1)
    assert [stage.layers for (stage,) in four] == [(0, 1), (2, 3, 4), (5, 6, 7), (8,)]
    assert [stage.embedding for (stage,) in four] == [True, False, False, False]
    assert [stage.head for (stage,) in four] == [False, False, False, True]
    assert [len(stage.layers) for (stage,) in layers(7, 3, last=1)] == [3, 3, 1]
    assert [len(stage.layers) for (stage,) in layers(5, 2, first=2, last=3)] == [2, 3]
    interleaved = Layout(pipeline=2, virtual_pipeline=2, first_stage_layers=1, last_stage_layers=3)
    one, two = (process_groups.chunk_specs(8, interleaved, rank) for rank in range(2))
    assert [chunk.layers for chunk in one] == [(0,), (3, 4)]
    assert [chunk.layers for chunk in two] == [(1, 2), (5, 6, 7)]


def test_a_run_that_learns_nothing_is_warned_of(folder, world, capsys):
    zero = {f"optimizer__{group}__lr": 0.0 for group in ("matrix", "embedding", "head", "scalar")}
    train(tiny_config(folder, "adamw", train__exit_step=1, **zero), world)
    assert "warning: all learning rates are 0" in capsys.readouterr().out
    one = zero | {"optimizer__head__lr": 1e-3}
    train(tiny_config(folder, "adamw", train__exit_step=1, **one), world)
    assert "learning rates" not in capsys.readouterr().out


def test_the_logged_rates_are_those_that_the_step_was_taken_with(folder, world):
    """Test the first steps of a warm-up, in which all learning rates differ."""
    peaks_of = enumerate(GROUPS, 1)
    keys: dict[str, Any] = {f"optimizer__{group}__lr": 0.01 * i for i, group in peaks_of}
    keys |= {"schedule__warmup_steps": 3, "train__steps": 6, "log__interval": 1}
    config = tiny_config(folder, "muon", **keys)
    trainer = build_trainer(config, world, *build_data(config))
    taken: list[dict[str, float]] = []
    step, assign = trainer.optimizer.step, trainer.optimizer.domains[0].assign
    peaks = {assigned.group: assigned.lr for assigned in map(assign, trainer.model.units)}

    def noted(factor: torch.Tensor, active: torch.Tensor) -> None:
        taken.append({f"lr/{group}": lr * float(factor) for group, lr in peaks.items()})
        step(factor, active)

    trainer.optimizer.step = noted
    logged: list[dict[str, float]] = []
    loop = Loop(trainer, Hooks(report=lambda metrics, step: logged.append(metrics)))
    for _ in range(6):
        loop.step_and_report()
    for i, rates in enumerate(taken):
        assert {*rates} == {f"lr/{group}" for group in GROUPS}
        assert {k: logged[i][k] for k in rates} == pytest.approx(rates, rel=1e-6)
    assert len({rates["lr/matrix"] for rates in taken}) >= 5


def test_a_resume_keeps_the_number_of_consecutive_skipped_steps(folder, world):
    """The error also names the samples of steps before the run was resumed."""
    config = tiny_config(folder, "muon", train__max_skipped_steps=2)
    bad = torch.tensor(False)
    first, second = (build_trainer(config, world, *build_data(config)) for _ in range(2))
    first.guard.record(1, (0, 8), bad)
    first.guard.record(2, (8, 16), bad)
    state = json.loads(json.dumps(first.checkpoint()))
    second.restore(bind(Progress, state["progress"]), state["trainer"])
    assert second.guard.skipped == 2
    with pytest.raises(NonFiniteError, match="in steps 1 to 3 .samples 0 to 23."):
        second.guard.record(3, (16, 24), bad)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_is_deterministic_if_its_config_says_so(wanted, world, folder):
    config = tiny_config(
        folder, "adamw", run__deterministic=wanted, train__exit_step=2, validation__samples=2
    )
    seen = []
    train(
        config, world, on_step=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    assert seen == [wanted, wanted]
    assert not torch.are_deterministic_algorithms_enabled()


LOSSES = {"web": 4.0, "books": 5.0}


@pytest.mark.parametrize(
    ("mixture", "mean"),
    [
        ({"web": 3.0, "books": 1.0, "code": 9.0}, 4.25),
        ({"web": 3.0}, 4.5),
        ({"web": 3.0, "books": 0.0}, 4.5),
        ({}, 4.5),
    ],
    ids=["all named", "one named", "one of weight 0", "none named"],
)
def test_the_mean_over_sets_is_weighted_as_training_is(mixture, mean, monkeypatch):
    """Bits per byte have a mean only if they are known for every set."""
    monkeypatch.setattr(evaluation, "mean_loss", lambda model, groups, each, **_: LOSSES[each.name])
    for bits in ({4.0: 2.0, 5.0: 2.5}, {4.0: 2.0}):  # by loss
        sets = [SimpleNamespace(name=name, bits_per_byte=bits.get) for name in LOSSES]
        options = {"micro_batch": 1, "stop": lambda: False, "mixture": mixture}
        found = evaluation.evaluate(None, None, sets, **options)
        assert found["val/loss"] == pytest.approx(mean) and found["val/web/bpb"] == 2.0
        assert found.get("val/bpb") == (pytest.approx(mean / 2) if len(bits) == 2 else None)
