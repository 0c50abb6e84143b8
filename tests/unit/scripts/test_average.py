"""scripts/average.py: the mean of checkpoints equals an independently computed mean, and can be
used like any other model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel.comm import groups as process_groups
from scripts import convert_hf
from scripts.average import chosen, dropped, main
from scripts.huggingface.card import card
from scripts.weights_only import Mean
from tests.fuzzed import FLIP, damage
from tests.live_bytes import peak_bytes
from tests.run_configs import MIXTURE, tiny_config
from tests.run_results import state_of, tensors_of
from tests.unit.training.checkpoint.test_checkpoint import forge, reseal
from training.assignments import config_routes
from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.checkpoint.stored_checkpoint import CheckpointWeights
from training.run import train

STEPS = (1, 2, 3)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sphere": ("spectral_sphere", MIXTURE | {"optimizer__matrix__lr": 0.5}),
    "PC layers": ("muon", {"pc__level": 2}),
}
"""Maps each run to its rule and config keys. The first run also has buffers, which are expert
biases."""


def trained(folder: Path, name: str) -> Path:
    """Train a run that saves checkpoints at three steps."""
    rule, keys = RUNS[name]
    common = {"train__steps": 3, "checkpoint__interval": 1, "validation__samples": 2}
    common |= {"train__micro_batch": 8, "run__dir": str(folder / name)}
    train(tiny_config(str(folder), rule, **common, **keys), process_groups.initialize())
    process_groups.shutdown()
    return folder


@pytest.fixture(scope="module")
def runs(shared_folder: Path) -> Path:
    """A folder with a run whose weights are on spheres."""
    return trained(shared_folder, "sphere")


@pytest.fixture(scope="module")
def other_runs(runs: Path) -> Path:
    """The same folder, in which there is also a run with PC layers."""
    return trained(runs, "PC layers")


@pytest.fixture
def copied(runs: Path, tmp_path: Path):
    """Copies a run, so that a test can damage it."""
    return lambda name: Path(shutil.copytree(runs / name, tmp_path / "run"))


def weights_of(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint in float64, without the gammas of PC
    layers."""
    state = state_of(folder, step)
    kinds = ("weight/", "buffer/")
    return {k: v.double() for k, v in state.items() if k.startswith(kinds) and ".gamma" not in k}


@pytest.mark.usefixtures("no_memory_is_zero")
def test_the_mean_of_every_tensor_is_that_by_hand(runs: Path, tmp_path: Path, capsys) -> None:
    assert main([str(runs / "sphere"), str(tmp_path / "mean")]) == 0
    printed = capsys.readouterr().out
    assert "average = 0.3333 * step 1 + 0.3333 * step 2 + 0.3333 * step 3" in printed
    assert "the average contains no optimizer state" in printed
    found = tensors_of(read_checkpoint(tmp_path / "mean"))
    parts = [weights_of(runs / "sphere", step) for step in STEPS]
    assert found.keys() == parts[0].keys()
    for key, value in found.items():
        assert not torch.equal(parts[0][key], parts[-1][key]), key
        by_hand = torch.stack([part[key] for part in parts]).mean(0)
        # One rounding to float32.
        torch.testing.assert_close(value.double(), by_hand, rtol=2**-23, atol=1e-12)


def test_a_moving_average_is_that_of_torch(runs: Path, tmp_path: Path, capsys) -> None:
    arguments = [str(runs / "sphere"), str(tmp_path / "mean"), "--last", "3", "--ema", "0.75"]
    assert main(arguments) == 0
    key = "weight/layers.0.down"
    running = weights_of(runs / "sphere", 1)[key]
    for step in (2, 3):
        running = torch.lerp(running, weights_of(runs / "sphere", step)[key], 0.25)
    found = tensors_of(read_checkpoint(tmp_path / "mean"), key)[key]
    torch.testing.assert_close(found.double(), running, rtol=2**-22, atol=1e-12)
    assert "0.5625 * step 1 + 0.1875 * step 2 + 0.25 * step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "last", "averaged", "rest"),
    [([3, 1], None, [1, 3], "step 2"), (None, 2, [2, 3], "step 1")],
)
def test_the_last_in_an_average_is_the_newest(steps, last, averaged, rest, runs, tmp_path) -> None:
    infos, left_out = chosen(runs / "sphere", tmp_path / "mean", steps, last)
    assert ([info.step for info in infos], left_out) == (averaged, [rest])


@pytest.mark.slow
def test_it_exports_and_starts_a_run(other_runs, tmp_path: Path, world, capsys) -> None:
    runs, mean = other_runs, tmp_path / "mean"
    assert main([str(runs / "PC layers"), str(mean), "--steps", "1", "3"]) == 0
    printed = capsys.readouterr().out
    assert "not averaged: step 2\n" in printed and f"initialize_from={mean}" in printed
    exported = tmp_path / "exported"
    assert convert_hf.main(["export", str(mean), str(exported), "--no-tokenizer"]) == 0
    card = (exported / "README.md").read_text()
    assert "| mean of | step 1 times 0.5, step 3 times 0.5 |" in card
    theirs = load_file(exported / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    ours = CheckpointWeights(read_checkpoint(mean)).parameter("layers.1.mlp.down")
    assert torch.equal(theirs, ours)
    beginning = {"checkpoint__initialize_from": str(mean), "run__dir": str(tmp_path / "next")}
    keys = {**beginning, "train__steps": 3, "validation__samples": 2}
    shutil.copy(runs / "tokens.bin", tmp_path), shutil.copy(runs / "tokens.idx", tmp_path)
    assert train(tiny_config(str(tmp_path), "muon", **keys), world).step == 3
    assert f"initial weights: step 3 of {mean}" in capsys.readouterr().out


@pytest.mark.slow
def test_pc_layers_become_the_mean_of_what_they_multiply_by(other_runs, tmp_path) -> None:
    runs = other_runs
    assert main([str(runs / "PC layers"), str(tmp_path / "mean")]) == 0
    mean = CheckpointWeights(read_checkpoint(tmp_path / "mean"))
    assert mean.config.pc is None
    folders = [step_folder(runs / "PC layers", step) for step in STEPS]
    parts = [CheckpointWeights(read_checkpoint(folder)) for folder in folders]
    for name, shape in mean.layouts().items():
        values = [part.parameter(name).view(shape).double() for part in parts]
        by_hand, found = torch.stack(values).mean(0), mean.parameter(name).double()
        torch.testing.assert_close(found, by_hand, rtol=2**-23, atol=1e-12)


def test_a_checkpoint_of_another_run_is_refused(copied, tmp_path, refusal) -> None:
    """A checkpoint with another model or tokenizer is rejected as well."""
    run = copied("sphere")
    other, target = step_folder(run, 2), [str(run), str(tmp_path / "mean")]
    saved = (other / "meta.json").read_text()
    reseal(other, lambda meta: meta.update(run_id="another"))
    said = refusal(main(target))
    assert f"{other} must be from the same run as" in said and "got run_id another" in said
    reseal(other, lambda meta: meta.update(json.loads(saved)))
    reseal(other, lambda meta: meta["identity"]["tokenizer"].update(sha256="0" * 64))
    assert "tokenizer was 0000" in refusal(main(target))
    reseal(other, lambda meta: meta.update(json.loads(saved)))
    config = (other / "config.yaml").read_text()
    forge(other, "config.yaml", config.replace("rope_base: 10000.0", "rope_base: 20000.0").encode())
    said = refusal(main(target))
    assert (
        "must have the same model as" in said and "rope_base was 20000.0 and is now 10000.0" in said
    )
    assert "must contain checkpoints" in refusal(main([str(other), target[1]]))
    assert "the run folder no must exist" in refusal(main(["no", target[1]]))
    assert not (tmp_path / "mean").exists()


def test_broken_checkpoints_are_left_out_by_name(copied, tmp_path, capsys, refusal) -> None:
    run, mean = copied("sphere"), tmp_path / "mean"
    (step_folder(run, 2) / "COMPLETE").unlink()
    assert main([str(run), str(mean)]) == 0
    printed = capsys.readouterr().out
    assert "average = 0.5 * step 1 + 0.5 * step 3\n" in printed
    (left_out,) = [line for line in printed.splitlines() if line.startswith("not averaged: ")]
    assert "step 2 (broken): " in left_out and str(step_folder(run, 2)) in left_out
    info = read_checkpoint(mean)
    assert info.meta["averaged"] == {"steps": [1, 3], "weights": [0.5, 0.5], "on_sphere": False}
    text = card(info, name="mean", architecture="A", dtype="float32")
    assert "| mean of | step 1 times 0.5, step 3 times 0.5 |" in text
    assert "already exists" in refusal(main([str(run), str(mean)]))
    other = [str(run), str(tmp_path / "other")]
    assert str(step_folder(run, 2)) in refusal(main([*other, "--steps", "1", "2"]))
    for step in (1, 3):
        state = next((step_folder(run, step) / "state").glob("*.distcp"))
        whole = state.read_bytes()
        damage(state, FLIP)
        assert "has changed since it was written" in refusal(main(other))
        state.write_bytes(whole)
    shutil.rmtree(step_folder(run, 3))
    assert "must contain at least two checkpoints, got 1" in refusal(main(other))


def test_an_average_is_not_averaged_as_a_checkpoint(copied, tmp_path: Path, capsys) -> None:
    run = copied("sphere")
    origin = {"path": "runs/before", "step": 7, "sha256": ""}
    reseal(step_folder(run, 3), lambda meta: meta.update(initialized_from=origin))
    assert main([str(run), str(tmp_path / "mean")]) == 0
    mean, last = (read_checkpoint(path).meta for path in (tmp_path / "mean", step_folder(run, 3)))
    for key in ("step", "identity", "progress", "initialized_from"):
        assert mean[key] == last[key]
    shutil.rmtree(step_folder(run, 3))
    shutil.copytree(tmp_path / "mean", step_folder(run, 3))
    assert main([str(run), str(tmp_path / "again")]) == 2
    assert "must be from the same run as" in capsys.readouterr().err


@pytest.mark.parametrize("back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_matrices_are_put_back_on_their_spheres_if_asked(back, runs, tmp_path, capsys) -> None:
    asked = ["--on-sphere"] if back else []
    assert main([str(runs / "sphere"), str(tmp_path / "mean"), *asked]) == 0
    info = read_checkpoint(tmp_path / "mean")
    routes = [route for route in config_routes(info.config) if route.radius is not None]
    assert any("--on-sphere had no effect" in text for text in dropped(info, [], True))
    printed = capsys.readouterr().out
    assert f"spectral norms of {len(routes)} sphere-rule matrices are " in printed
    norms = []
    weights = CheckpointWeights(info)
    units = {unit.name: unit for unit in weights.units}
    for route in routes:
        weight = weights.weight(units[route.unit])
        norms.append(torch.linalg.matrix_norm(weight.double(), 2).item() / route.radius)
    if back:
        assert norms == pytest.approx([1.0] * len(norms), abs=1e-5)
    else:
        assert f"are {min(norms):.4f} to {max(norms):.4f} times their radius" in printed
        assert max(abs(norm - 1) for norm in norms) > 0.01


def test_one_parameter_is_in_memory_at_a_time(runs: Path) -> None:
    """A parameter is held in float64 and float32. Rounding temporarily takes the same amount of
    memory again."""
    infos = [read_checkpoint(step_folder(runs / "sphere", step)) for step in STEPS]
    parts = [CheckpointWeights(info) for info in infos]
    mean = Mean(parts, [1 / 3] * 3, on_sphere=False)
    largest = max(sum(unit.numel for unit in units) for units in parts[0].parameters.values())

    def read_all() -> None:
        for name in parts[0].parameters:
            mean.read(name)

    assert peak_bytes(read_all) <= 20 * largest


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_would_take_an_output_for_its_own_checkpoint(linked, runs, tmp_path, refusal) -> None:
    run = runs / "sphere"
    (tmp_path / "link").symlink_to(step_folder(run, 9).parent)
    output = tmp_path / "link" / "step_00000009" if linked else step_folder(run, 9)
    assert "must not be in a run's checkpoints" in refusal(main([str(run), str(output)]))
    assert not step_folder(run, 9).exists()
    inside = refusal(main([str(run), str(step_folder(run, 3) / "mean")]))
    assert "must not be inside a checkpoint, got" in inside
    renamed = refusal(main([str(run), str(tmp_path / "step_00000009")]))
    assert "the folder's name must contain 3, the step in meta.json" in renamed
    assert not (tmp_path / "step_00000009").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--steps", "1", "7"], "has no checkpoint at step 7; available: 1, 2, 3"),
        (["--last", "4"], "--last must be at most 3, the number of checkpoints in"),
    ],
)
def test_steps_that_are_not_there_are_refused(options, text, runs, tmp_path, refusal) -> None:
    said = refusal(main([str(runs / "sphere"), str(tmp_path / "mean"), *options]))
    assert said.startswith("error: ") and text in said and said.count("\n") == 1
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    "options",
    [["--steps", "1"], ["--steps", "2", "2"], ["--last", "1"], ["--ema", "1"], ["--ema", "nan"],
     ["--ema", "x"], ["--steps", "0", "1"], ["--last", "2", "--steps", "1", "2"]],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, runs, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(runs / "sphere"), str(tmp_path / "mean"), *options])
    assert left.value.code == 2
    capsys.readouterr()


@pytest.mark.slow
def test_an_average_with_damaged_facts_is_refused(runs: Path, tmp_path: Path, capsys) -> None:
    mean = tmp_path / "mean"
    assert main([str(runs / "sphere"), str(mean), "--last", "2"]) == 0
    reseal(mean, lambda meta: meta["averaged"].update(steps="all"))
    assert convert_hf.main(["export", str(mean), str(tmp_path / "out"), "--no-tokenizer"]) == 2
    assert "averaged.steps must be" in capsys.readouterr().err
