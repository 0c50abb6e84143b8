"""Every metric of a run is compared with an independent computation here or in another test."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.run_configs import MIXTURE, tiny_config
from tests.run_results import json_lines
from tests.token_files import write_token_set
from training.config import Config
from training.data.validation_data import ValidationData
from training.monitor.matrix_figures import global_figures
from training.run import train

STEPS, LAST, CLIP, BATCH, LENGTH = 30, 20, 0.5, 8, 32
"""Number of steps in the schedule, of which the run takes the first `LAST`, and other settings."""
SIZES = {"a": 2.0, "b": 3.0}
"""Loss divided by the bits per byte, for each validation set."""
Line = dict[str, Any]


def rate(line: Line, group: str, config: Config) -> float:
    """Return the learning rate of a step: two warm-up steps, then a cosine to a tenth of the
    peak."""
    index = line["step"] - 1
    if index < 2:
        factor = (index + 1) / 2
    else:
        share = (index - 2) / (STEPS - 2)
        factor = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
    return getattr(config.optimizer, group).lr * factor


def flops_per_token(config: Config) -> float:
    """Return six FLOPs per active weight in a matmul, with the vocabulary padded to 128, plus the
    FLOPs of causal attention."""
    model = config.model
    width, head = model.hidden, model.hidden // model.heads
    attention = width * head * (2 * model.heads + 2 * model.kv_heads)
    dense, mixed = 3 * width * model.ffn, 2 * 3 * width * 32 + width * 4
    weights = 2 * attention + dense + mixed + width * 128
    return 6 * weights + 6 * model.layers * width * LENGTH


CHECKED: dict[str, Callable[[Line, re.Match[str], Config], float]] = {
    r"lr/(\w+)": lambda line, name, config: rate(line, name[1], config),
    r"optim/clip_coef": lambda line, *_: min(1.0, CLIP / line["optim/grad_norm"]),
    r"optim/skipped_steps|optim/refused|spectral/unconverged|pc/domain/outside": lambda *_: 0,
    r"pc/domain/max": lambda *_: 1,  # the spectral norm is tracked to its rounding
    r"progress/tokens": lambda line, *_: line["step"] * BATCH * LENGTH,
    r"progress/pct": lambda line, *_: 100 * line["step"] / STEPS,
    r"progress/eta_s": lambda line, *_: (LAST - line["step"]) * line["perf/step_time_s"],
    r"perf/tokens_per_sec(_per_gpu)?": lambda line, *_: BATCH * LENGTH / line["perf/step_time_s"],
    r"perf/tflops_per_gpu": lambda line, _, config: (
        flops_per_token(config) * BATCH * LENGTH / line["perf/step_time_s"] / 1e12
    ),
    r"penalty/on": lambda line, *_: float(line["step"] <= STEPS / 2),
    r"val/(\w+)/ppl": lambda line, name, _: math.exp(line[f"val/{name[1]}/loss"]),
    r"val/(\w+)/bpb": lambda line, name, _: line[f"val/{name[1]}/loss"] / SIZES[name[1]],
    r"val/(loss|bpb)": lambda line, name, _: (
        0.75 * line[f"val/a/{name[1]}"] + 0.25 * line[f"val/b/{name[1]}"]
    ),
    r"moe/max_vio": lambda line, *_: line["moe/max_vio/1"],  # of the only layer with experts
}
"""Functions that compute the expected values of metrics, by pattern of the name."""

ELSEWHERE = {
    r"train/loss|val/\w+/loss": "parity/, on the same weights",
    r"optim/grad_norm": "distributed/test_gradients.py",
    r"perf/step_time_s": "seconds, by the clock",
    r"moe/max_vio/\d": "unit/training/monitor/test_expert_balance.py",
    r"moe/global_aux_loss": "distributed/test_gradients.py",
    r"monitor/.*|pc/gamma/m..": "`aggregates`, from the figures of unit/training/monitor/",
    r"penalty/(?!on).*": "unit/training/test_penalty_schedule.py",
}
"""Maps patterns of other metrics to the tests that check them, or to their units."""


def aggregates(monitored: Line) -> dict[str, float]:
    """Return the metrics computed from a line of monitors.jsonl, without the condition numbers of
    whole matrices."""
    values: dict[str, list[float]] = {}
    inside = {"spectral_norm": [], "applied_rms": [], "criterion_ratio": [], "pc_norm_error": []}
    for unit in monitored["units"].values():
        for name, value in unit.items():
            if name not in ("role", "layer") and isinstance(value, float):
                values.setdefault(f"monitor/{name}/{unit['role']}", []).append(value)
                if name in inside and unit["role"] not in ("embedding", "head", "router"):
                    inside[name].append(value)
    found = {name: fmean(each) for name, each in values.items()}
    ratios = inside.pop("criterion_ratio")
    found["monitor/criterion_ratio/geometric_mean"] = math.exp(fmean(map(math.log, ratios)))
    found["monitor/criterion_ratio/share"] = sum(x >= 1 for x in ratios) / len(ratios)
    gammas = values["monitor/gamma/o"]
    found |= {"pc/gamma/min": min(gammas), "pc/gamma/max": max(gammas)}
    blocks = monitored["blocks"].values()
    for name in {name for block in blocks for name in block}:
        inside[name] = [block[name] for block in blocks if name in block]
    return found | {f"monitor/{name}/max": max(each) for name, each in inside.items()}


def test_every_metric_is_what_its_name_says(folder: str, world, monkeypatch) -> None:
    monkeypatch.setattr(ValidationData, "bits_per_byte", lambda data, loss: loss / SIZES[data.name])
    keys: dict[str, Any] = MIXTURE | {"model__moe__global_aux_loss": 0.01}
    for kind in ("train", "validation"):
        for name in ("a", "b"):
            keys[f"data__{kind}__{name}__path"] = f"{folder}/tokens"
        keys[f"data__{kind}__walk"] = "null"
    keys |= {"data__train__a__weight": 3, "data__train__b__weight": 1}
    # Sets of different losses, so that their mean shows the weights.
    write_token_set(Path(folder) / "few", tokens=2_000, vocab=30, seed=1)
    keys["data__validation__b__path"] = f"{folder}/few"
    # Several steps of each, as a single figure may agree by chance.
    keys |= {"log__interval": 3, "monitors__interval": 5, "validation__interval": 10}
    keys |= {"train__micro_batch": 4, "train__steps": STEPS, "train__exit_step": LAST}
    keys["gram_penalty__horizon"] = 0.5
    keys |= {"pc__level": 2, "pc__blocks": "[o]"}
    config = tiny_config(folder, "muon", optimizer__clip__max_norm=CLIP, **keys)
    train(config, world)
    lines = json_lines(Path(folder) / "run" / "metrics.jsonl")
    for monitored in json_lines(Path(folder) / "run" / "monitors.jsonl"):
        (line,) = (line for line in lines if line["step"] == monitored["step"])
        logged = {k: v for k, v in line.items() if k.startswith(("monitor/", "pc/gamma/"))}
        whole = {k for k in logged if k.startswith("monitor/condition_number/geometric_mean")}
        expected = aggregates(monitored)
        if "train/loss" not in line:  # a step that only the monitors log
            del expected["pc/gamma/min"], expected["pc/gamma/max"]
        assert {k: v for k, v in logged.items() if k not in whole} == pytest.approx(expected)
    met: set[str] = set()
    for line in lines:
        for name, value in line.items():
            checks = {p: m for p in CHECKED if (m := re.fullmatch(p, name))}
            others = [pattern for pattern in ELSEWHERE if re.fullmatch(pattern, name)]
            assert name == "step" or len(checks) + len(others) == 1, name
            for pattern, found in checks.items():
                known = CHECKED[pattern](line, found, config)
                assert value == pytest.approx(known, rel=1e-4, abs=1e-9), (name, line["step"])
            met |= {*checks, *others}
    assert met == {*CHECKED, *ELSEWHERE}
    reports = [line for line in lines if "train/loss" in line]
    names = [{n for n in line if not n.startswith(("val/", "monitor/"))} for line in reports]
    assert [line["step"] for line in reports] == [3, 6, 9, 12, 15, 18, 20]
    assert all(each == names[0] for each in names)  # the last step is reported like all others
    assert abs(lines[-1]["val/a/loss"] - lines[-1]["val/b/loss"]) > 0.01
    assert [line["step"] for line in lines] == [1, 3, 5, 6, 9, 10, 12, 15, 18, 20]


def test_figures_of_the_model_leave_out_matrices_without_them() -> None:
    """Matrices lack some metrics if layers are measured in rotation. The largest error is the error
    with the largest magnitude."""
    records = [
        {"role": "q", "layer": 0, "criterion_ratio": 2.0, "radius_error": 0.25},
        {"role": "q", "layer": 1, "criterion_ratio": 0.5, "radius_error": -0.5},
        {"role": "o", "layer": 0},
        {"role": "router", "layer": 0, "criterion_ratio": 9.0, "radius_error": 9.0},
    ]
    assert global_figures(records, ["q", "o"]) == pytest.approx(
        {
            "monitor/criterion_ratio/geometric_mean": 1.0,
            "monitor/criterion_ratio/share": 0.5,
            "monitor/radius_error/max": 0.5,
        }
    )
