"""What the ranks of the monitor tests run: a few steps, and every figure computed again."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from models.units import Unit
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.optimizer.materialized_pc import MaterializedStack
from tests.distributed.workers import rank_folder, start, whole_gradients, whole_unit
from tests.run_configs import tiny_config
from training.build import build_data, build_trainer
from training.loop import Trainer
from training.schedule import learning_rate_factor

STEPS = 4
GROUPS = "[weights,gradients,updates,activations,attention,noise]"
Figures = dict[str, float]


def seen_and_computed(folder: str, cases: list[tuple[dict[str, int], str, dict[str, Any]]]) -> Any:
    """What monitors wrote of step 4, on rank 0, and figures of this rank's units computed again.

    There is one entry per (layout, rule, keys of the config); the second figures come from NumPy's
    singular values in float64.
    """
    found = []
    for layout, rule, keys in cases:
        groups = start(layout)
        placed = {f"parallel__{key}": value for key, value in layout.items()}
        config = tiny_config(
            rank_folder(folder),
            rule,
            monitors__interval=2,
            monitors__groups=GROUPS,
            monitors__noise_samples=STEPS,
            train__steps=STEPS,
            **placed,
            **keys,
        )
        trainer = build_trainer(config, groups, *build_data(config))
        found.append(watched(trainer, groups))
        dist.barrier(groups.host)
        process_groups.shutdown()
    return found


def watched(trainer: Trainer, groups: Groups) -> dict[str, Any]:
    """The monitors' lines of this run, and the figures of this rank's units in its last step.

    The figures are computed independently.
    """
    lines: dict[int, dict[str, Any]] = {}
    trainer.record = lambda line, step: lines.update({step: line})
    gradients: list[dict[str, Tensor]] = []
    after_backward = trainer.monitors.after_backward

    def kept_gradients() -> None:
        gradients.append(whole_gradients(trainer.model))
        after_backward()

    trainer.monitors.after_backward = kept_gradients  # type: ignore[method-assign]
    weights = [whole_weights(trainer, groups)]
    effective: list[dict[str, Tensor]] = []
    for _ in range(STEPS):
        effective.append(whole_parameters(trainer, groups))
        trainer.advance()
        weights.append(whole_weights(trainer, groups))
    expected: dict[str, Figures] = {}
    for unit in trainer.model.units:
        if not unit.is_matrix:
            continue
        own = expected[unit.name] = gradient_figures(*(g[unit.name] for g in gradients[-2:]))
        if unit.name in weights[0]:
            own |= weight_figures(weights[-2][unit.name])
            own |= update_figures(trainer, unit, [w[unit.name] for w in weights])
        if trainer.optimizer.domains[0].assign(unit).pc is not None:
            for name, value in weight_figures(effective[-1][unit.name]).items():
                own[f"effective_{name}"] = value
    # Only the owners of PC layers hold W.
    for name in weights[0].keys() - expected.keys():
        unit = next(u for b in trainer.optimizer.stacks for u in b.units if u.name == name)
        expected[name] = weight_figures(weights[-2][name])
        expected[name] |= update_figures(trainer, unit, [w[name] for w in weights])
    plain = {
        name: {figure: v if isinstance(v, list) else float(v) for figure, v in own.items()}
        for name, own in expected.items()
    }
    return {"lines": lines, "expected": plain}


def whole_parameters(trainer: Trainer, groups: Groups) -> dict[str, Tensor]:
    """Every matrix that this rank holds a part of, as the model multiplies by it."""
    units = [unit for unit in trainer.model.units if unit.is_matrix]
    return {unit.name: whole_unit(trainer.model, groups, unit).clone() for unit in units}


def whole_weights(trainer: Trainer, groups: Groups) -> dict[str, Tensor]:
    """The same without PC layers, whose W their owners keep."""
    found = {
        unit.name: whole_unit(trainer.model, groups, unit).clone()
        for unit in trainer.model.units
        if unit.is_matrix and trainer.optimizer.domains[0].assign(unit).pc is None
    }
    for batch in trainer.optimizer.stacks:
        if isinstance(batch, MaterializedStack):
            found |= {u.name: batch.weight[i].clone() for i, u in enumerate(batch.units)}
    return found


def weight_figures(weight: Tensor) -> dict[str, Any]:
    """Figures of one weight, from NumPy."""
    w = weight.double().numpy()
    s = np.linalg.svd(w, compute_uv=False)
    share = s / s.sum()
    gram = w.T @ w
    square = np.mean(w**2)
    return {
        "spectral_norm": s[0],
        "weight_rms": np.sqrt(square),
        "stable_rank": np.sum(s**2) / s[0] ** 2,
        "effective_rank": np.exp(-np.sum(share * np.log(share))),
        "condition_number": s[0] / s[-math.ceil(len(s) / 10) :].mean(),
        "spectral_gap": (s[0] - s[1]) / s[0] if len(s) > 1 else 1.0,
        "off_diagonal_gram": np.sum((gram - np.diag(np.diag(gram))) ** 2),
        "correlation": (w.size * w.mean() ** 2 - square) / ((w.size - 1) * square),
        "quantiles": np.quantile(s, np.linspace(0, 1, 11)).tolist(),
    }


def gradient_figures(before: Tensor, now: Tensor) -> Figures:
    """Figures of the later of two steps' mean gradients."""
    g, b = now.double().numpy(), before.double().numpy()
    s = np.linalg.svd(g, compute_uv=False)
    return {
        "gradient_rms": np.sqrt(np.mean(g**2)),
        "gradient_nuclear_rank": s.sum() ** 2 / np.sum(s**2),
        "gradient_stable_rank": np.sum(s**2) / s[0] ** 2,
        "gradient_alignment": np.sum(g * b) / (np.linalg.norm(g) * np.linalg.norm(b)),
    }


def update_figures(trainer: Trainer, unit: Unit, weights: list[Tensor]) -> Figures:
    """Figures of the last step's update, and of how much the updates agree.

    They come from the weights before and after each step and the rule that took it.
    """
    assigned = trainer.optimizer.domains[0].assign(unit)
    updates = []
    for index in range(STEPS):
        config = trainer.config
        factor = learning_rate_factor(index, config.train.steps, config.schedule)
        kept = 1 - assigned.lr * factor * assigned.weight_decay
        old, new = (w.double().numpy() for w in weights[index : index + 2])
        updates.append(new - kept * old)
    earlier, now = updates[-2:]
    s = np.linalg.svd(now, compute_uv=False)
    norms = np.linalg.norm(earlier) * np.linalg.norm(now)
    return {
        "applied_rms": np.sqrt(np.mean(now**2)),
        "update_stable_rank": np.sum(s**2) / s[0] ** 2,
        "update_alignment": np.sum(earlier * now) / norms,
        **{f"update_{name}": value for name, value in noise_figures(updates).items()},
    }


def noise_figures(samples: list[np.ndarray]) -> Figures:
    """Signal, noise and the noise's largest share, from singular values of centred samples."""
    flat = np.stack([sample.ravel() for sample in samples])
    mean = flat.mean(0)
    spread = np.linalg.svd(flat - mean, compute_uv=False) ** 2 / (len(flat) - 1)
    noise = spread.sum()
    signal = max(mean @ mean - noise / len(flat), 0.0)
    return {
        "snr": signal / noise,
        "signal_share": signal / (signal + noise),
        "top_share": spread[0] / noise,
    }


def merged(results: list[Any], case: int) -> tuple[dict[int, Any], Mapping[str, Figures]]:
    """The lines of rank 0 by step, and the figures that all ranks computed."""
    expected: dict[str, Figures] = {}
    for rank in results:
        for name, own in rank[case]["expected"].items():
            expected.setdefault(name, {}).update(own)
    return results[0][case]["lines"], expected
