"""From a config to a finished run: builds data, model and optimizer, trains, reports."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.size import all_units, model_size
from parallel.groups import Groups
from parallel.model import ParallelModel, build_model
from parallel.optimizer import ReplicatedOptimizer
from parallel.routing import Assign, Route, route
from training.assignments import assignments
from training.config import Config, to_yaml
from training.data import (
    GlobalBatchSampler,
    TrainingData,
    ValidationData,
    training_loader,
)
from training.errors import DataError
from training.loop import Outcome, StepResult, Trainer, unigram_comparison
from training.manifest import MANIFEST_FILE, Manifest, read_manifest
from training.metrics import MetricsWriter, console_line, peak_flops
from training.token_bytes import token_byte_lengths
from training.token_set import check_vocabulary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def data_manifest(config: Config) -> Manifest | None:
    """The manifest beside the first training set, None if that folder has none."""
    folder = Path(next(iter(config.data.train.values())).path).parent
    return read_manifest(folder) if (folder / MANIFEST_FILE).exists() else None


def with_vocabulary(config: Config) -> Config:
    """`config` with model.vocab_size filled in from the data manifest if it is null.

    Raises DataError if it is null and there is no manifest.
    """
    if config.model.vocab_size is not None:
        return config
    manifest = data_manifest(config)
    if manifest is None:
        path = next(iter(config.data.train.values())).path
        raise DataError(
            f"model.vocab_size is null and there is no {MANIFEST_FILE} beside {path} to take it "
            "from: prepare the data with scripts/prepare_data.py or set model.vocab_size"
        )
    return replace(config, model=replace(config.model, vocab_size=manifest.tokenizer.vocab_size))


def unit_options(config: Config) -> dict[str, Any]:
    """How the config splits fused weights into units."""
    return {
        "qkv_units": config.optimizer.qkv_units,
        "split_gate_up": config.optimizer.split_gate_up,
    }


def config_assignments(config: Config) -> Assign:
    """Role to assignment for the roles of the config's model."""
    roles = (unit.role for unit in all_units(config.model, **unit_options(config)))
    return assignments(config.optimizer, roles)


def config_routes(config: Config) -> list[Route]:
    """The routing table of the whole model."""
    return route(all_units(config.model, **unit_options(config)), config_assignments(config))


def build_data(config: Config) -> tuple[TrainingData, list[ValidationData]]:
    """The training data and every validation set, checked against the vocabulary.

    Raises DataError for files that are missing, corrupt, too short or of another tokenizer.
    """
    train = TrainingData(
        [(name, each.path, each.weight) for name, each in config.data.train.items()],
        sequence_length=config.train.sequence_length,
        seed=config.seed,
    )
    source = config.data.tokenizer or data_manifest(config)
    lengths = token_byte_lengths(source) if source is not None else None
    validation = [
        ValidationData(
            name,
            each.path,
            sequence_length=config.train.sequence_length,
            samples=config.validation.samples,
            token_bytes=lengths,
        )
        for name, each in config.data.validation.items()
    ]
    check_vocabulary([*train.sets, *(each.set for each in validation)], config.model.vocab_size)
    return train, validation


def build_parallel_model(config: Config, groups: Groups) -> ParallelModel:
    """This rank's share of the config's model."""
    return build_model(
        config.model,
        groups,
        seed=config.seed,
        sequence_length=config.train.sequence_length,
        dtype=DTYPES[config.train.precision],
        virtual_pipeline=config.parallel.virtual_pipeline,
        sequence_parallel=config.parallel.sequence_parallel,
        **unit_options(config),
    )


def train(
    config: Config,
    groups: Groups,
    *,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> Outcome:
    """Runs the config to its end on this rank; rank 0 writes `run.dir` and prints.

    Raises DataError for unusable data, NonFiniteError after too many skipped steps in a row.
    """
    data, validation = build_data(config)
    model = build_parallel_model(config, groups)
    optimizer = ReplicatedOptimizer(model, config_assignments(config), groups)
    report: Callable[[dict[str, Any], int], None] = lambda metrics, step: None  # noqa: E731
    if groups.rank == 0:
        report = open_run(config, data)
    device_name = torch.cuda.get_device_name() if groups.device.type == "cuda" else "cpu"
    trainer = Trainer(
        config,
        groups,
        model,
        optimizer,
        training_batches(config, groups, data),
        validation,
        report,
        flops_per_token=model_size(config.model, config.train.sequence_length).flops_per_token,
        peak_flops=peak_flops(device_name),
        on_step=on_step,
    )
    outcome = trainer.run()
    if groups.rank == 0:
        print_outcome(config, outcome, unigram_comparison(validation, outcome.validation))
    return outcome


def training_batches(config: Config, groups: Groups, data: TrainingData) -> Iterator[torch.Tensor]:
    """This rank's micro-batches `[micro_batch, sequence_length + 1]`, without end."""
    sampler = GlobalBatchSampler(
        consumed=0,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        data_rank=groups.data.rank,
        data_size=groups.data.size,
    )
    return iter(training_loader(data, sampler, workers=config.data.workers))


def open_run(config: Config, data: TrainingData) -> Callable[[dict[str, Any], int], None]:
    """A function that logs one step's metrics to the console and to `run.dir/metrics.jsonl`.

    Makes the run folder, with the resolved config, the routing table and the data's fingerprint.
    """
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    set_aside(folder / "metrics.jsonl")
    (folder / "config.yaml").write_text(to_yaml(config))
    write_routes(folder / "routing.jsonl", config_routes(config))
    samples = config.train.steps * config.train.global_batch
    used = [asdict(use) for use in data.describe(samples)]
    facts = {"fingerprint": data.fingerprint(), "sets": used}
    (folder / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
    for use in data.describe(samples):
        print(f"data {use}")
    writer = MetricsWriter(folder)

    def report(metrics: dict[str, Any], step: int) -> None:
        writer.log(metrics, step=step)
        if "train/loss" in metrics:
            print(console_line(metrics, step=step, total_steps=config.train.steps), flush=True)
        if metrics.get("spectral/unconverged"):
            print(
                f"warning: {metrics['spectral/unconverged']:.0f} multiplier solves so far ended "
                f"above tolerance (largest |f| now {metrics['spectral/residual/max']:.1e})",
                flush=True,
            )
        sets = [name for name in metrics if name.startswith("val/") and name.endswith("/loss")]
        if sets:
            losses = "  ".join(f"{name.split('/')[1]} {metrics[name]:.4f}" for name in sets)
            print(f"step {step} validation  {losses}", flush=True)

    return report


def set_aside(path: Path) -> None:
    """None; renames a file of an earlier run in the same folder to the next free `name.N`."""
    if path.exists() and path.stat().st_size:
        free = next(n for n in count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
        path.rename(path.with_suffix(f".{free}{path.suffix}"))


def write_routes(path: Path, routes: Sequence[Route]) -> None:
    """None; one JSON object per unit."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in routes))


def print_outcome(
    config: Config, outcome: Outcome, comparison: Sequence[tuple[str, float, float]]
) -> None:
    """None; prints how the run ended, with each set's loss beside its unigram entropy."""
    for name, loss, entropy in comparison:
        verdict = "below" if loss < entropy else "NOT below"
        print(f"val/{name}/loss {loss:.4f} is {verdict} the set's unigram entropy {entropy:.4f}")
    print(f"done: step {outcome.step} of {config.train.steps}, output in {config.run.dir}")
    sys.stdout.flush()
    if dist.is_initialized() and dist.get_world_size() > 1:
        sys.stderr.flush()
