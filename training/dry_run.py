"""Plan a run from its config. The plan includes the number of steps and the use of each data
set."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from models.families import model_size
from models.section import one_of
from parallel.plan.devices import DEVICES, REQUIRED, Device
from parallel.plan.planner import Plan, plan
from parallel.plan.step_shape import PlanInputs, StepShape
from parallel.plan.step_time import step_time
from spectral.rules.muon import MsignRule
from training.assignments import config_assignments, unit_options
from training.config import Config
from training.config.binding import InvalidConfigError, bind
from training.config.schedule import EqualSteps
from training.config.yaml_files import REPLACE, over, read_saved
from training.data.build_data import with_mock_sets
from training.data.manifest import manifest_of
from training.data.mock_tokens import MockTokens
from training.data.order import build_blend, repeats
from training.data.token_set import TokenSet
from training.errors import ConfigError
from training.machine.backends import DTYPES, exchange_dtype
from training.report.text import table


@dataclass(frozen=True)
class PhaseUse:
    """Data usage in one phase of a run.

    after_steps  number of steps before the phase
    samples      total number of samples from all sets
    weights      positive set weights by name
    """

    after_steps: int
    samples: int
    weights: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """Each set's share of the samples. The shares sum to 1."""
        total = math.fsum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}

    def tokens(self, sequence_length: int) -> dict[str, int]:
        """Return the exact number of target tokens from each set, keyed by the set's name."""
        used = build_blend(self.weights).used(self.samples).tolist()
        return {n: count * sequence_length for n, count in zip(self.weights, used, strict=True)}


def phase_uses(config: Config, last: int) -> list[PhaseUse]:
    """Return the data usage in each phase of the first `last` steps."""
    train = config.train
    first = {name: each.weight for name, each in with_mock_sets(config.data).train.items()}
    mixtures = [first, *(phase.weights for phase in config.data.phases)]
    starts = [0, *config.phase_starts()]
    uses, tokens = [], 0
    for start, end, weights in zip(starts, [*starts[1:], last], mixtures, strict=True):
        if start >= last:
            break
        samples = train.samples(start, tokens, min(end, last))
        tokens += samples * train.sequence_length
        named = {name: weight for name, weight in sorted(weights.items()) if weight}
        uses.append(PhaseUse(start, samples, named))
    return uses


def data_table(config: Config) -> str:
    """Return a table of each set's shares, tokens and epochs, with a note on repeated sets."""
    train = config.train
    uses, tokens, length = phase_uses(config, train.last), Counter[str](), train.sequence_length
    sizes = {}  # tokens per epoch
    for name, each in {} if config.data.mock else config.data.train.items():
        if (manifest := manifest_of(each.path)) is not None:
            sizes[name] = (manifest.sets[Path(each.path).name].tokens - 1) // length * length
    parts = [use.tokens(length) for use in uses]
    for part in parts:
        tokens.update(part)
    epochs = {name: tokens[name] / size for name, size in sizes.items() if size and name in tokens}
    header = ("set", *(f"from step {use.after_steps + 1:,}" for use in uses), "tokens", "epochs")
    rows = [
        (
            name,
            *(
                f"{use.shares.get(name, 0):.1%}, {part.get(name, 0):,}"
                for use, part in zip(uses, parts, strict=True)
            ),
            f"{count:,}",
            f"{epochs[name]:.2f}" if name in epochs else "unknown",
        )
        for name, count in tokens.items()
    ]
    missing = ", ".join(sorted(tokens.keys() - epochs.keys()))
    unknown = f"epochs are unknown without the manifest.json of {missing}" if missing else ""
    return "\n".join(filter(None, (table(header, rows), unknown, repeats(epochs))))


def plan_run(config: Config, world_size: int, device: Device | None = None) -> Plan:
    """Plan `config` on `world_size` GPUs of type `device` (default: plan.device)."""
    return plan(
        step_shape(config, world_size, device),
        config_assignments(config),
        step_flops=step_flops(config),
        **unit_options(config),
    )


def step_flops(config: Config) -> float:
    """Return the FLOPs of the forward and backward passes of one step, summed over ranks."""
    train = config.train
    tokens = train.global_batch * train.sequence_length
    return model_size(config.model, attended_length(config)).flops_per_token * tokens


def attended_length(config: Config) -> float:
    """Return the mean attended length of the training sets, weighted by usage.

    If any set is missing, use the attended length of mock tokens. If attention crosses document
    borders, the attended length is the sequence length.
    """
    if not config.data.document_mask:
        return config.train.sequence_length
    weights = {name: each.weight for name, each in config.data.train.items()}
    if config.data.phases:
        uses = phase_uses(config, config.train.steps)  # even if the run ends early
        weights = {n: sum(u.samples * u.shares.get(n, 0.0) for u in uses) for n in weights}
    sets = tuple((config.data.train[name].path, weight) for name, weight in weights.items())
    return _attended_length(sets if documents_known(config) else (), config.train.sequence_length)


def documents_known(config: Config) -> bool:
    """Return whether the files of all training sets are on this machine, so that their documents
    are known."""
    paths = [f"{each.path}{end}" for each in config.data.train.values() for end in (".idx", ".bin")]
    return not config.data.mock and all(map(os.path.isfile, paths))


@lru_cache(maxsize=64)
def _attended_length(sets: tuple[tuple[str, float], ...], length: int) -> float:
    if not sets:
        return MockTokens("plan", "", length, vocabulary=1).attended_length
    lengths = [TokenSet(path, path, length).attended_length for path, _ in sets]
    return float(np.average(lengths, weights=[weight for _, weight in sets]))


def step_shape(config: Config, world_size: int, device: Device | None = None) -> StepShape:
    """Return the `StepShape` on which the plan is based. The shape does not include update
    rules."""
    train, parallel = config.train, config.parallel
    distributed = config.optimizer.distributed
    copies = world_size // parallel.model_ranks
    device = device or device_named(config.plan.device)
    operands = "fp8" if train.fp8 is not None else train.precision
    if operands not in device.peak:
        raise ConfigError(
            f"train.fp8 must be null on {device.name}, got {train.fp8}: this GPU does not support "
            "fp8"
        )
    inputs = PlanInputs(
        **vars(parallel.layout),
        data=world_size // (parallel.tensor * parallel.pipeline),
        recompute=train.recompute,
        loss_chunk=train.loss_chunk,
        fused_loss=train.fused_loss is not None,
        compiled=compiled_on_gpu(config),
        fused_backward=fused_on_gpu(config),
        dtype=DTYPES[train.precision],
        rule_operands=rule_operands(config),
        gradient_bytes=DTYPES[distributed.gradient_dtype or "fp32"].itemsize,
        exchange_bytes=exchange_dtype(config).itemsize,
        momentum_bytes=DTYPES[distributed.momentum_dtype or "fp32"].itemsize,
        placement=distributed.placement,
        tensor_mode=distributed.tensor_mode,
        step_groups=distributed.step_groups,
        overlap_reduce=distributed.overlap_reduce,
        overlap_gather=distributed.overlap_gather,
    )
    return StepShape(
        model=config.model,
        inputs=inputs,
        device=device,
        micro_batch=train.micro_batch,
        sequence_length=train.sequence_length,
        microbatches=train.global_batch // (train.micro_batch * copies),
        operands=operands,
        attended=attended_length(config) if config.data.document_mask else None,
    )


def batch_seconds(config: Config, planned: Plan) -> list[tuple[EqualSteps, float]]:
    """Return a (segment, modelled step time) pair for each segment of the run. The global batch
    size is constant within a segment."""
    shape = step_shape(config, planned.gpus, planned.device)
    loads = [stage.load for stage in planned.stages]
    per_pass = shape.micro_batch * planned.gpus // config.parallel.model_ranks
    return [
        (each, step_time(replace(shape, microbatches=each.batch // per_pass), loads).total)
        for each in config.train.equal_steps(until=config.train.last)
    ]


def gpu_hours(config: Config, planned: Plan) -> float:
    """Return the GPU-hours of a run up to `train.last`, based on the modelled step times."""
    seconds = sum(each.steps * time for each, time in batch_seconds(config, planned))
    return seconds * planned.gpus / 3600


def compiled_on_gpu(config: Config) -> bool:
    """Return whether norms, rotary embeddings and activations are compiled on the planned GPU."""
    if config.train.compile == "auto":
        return config.model.attention_backend == "sdpa"
    return config.train.compile is not None


def fused_on_gpu(config: Config) -> bool:
    """Return whether fused kernels compute the gradients of gated blocks on the planned GPU."""
    plain = config.model.attention_backend != "transformer_engine"
    return plain and config.train.fused_backward is not None


def rule_operands(config: Config) -> str:
    """Return the matmul dtype of the update rule for the group `matrix`, as a key of
    `Device.peak`."""
    rule = config.optimizer.rule(config.optimizer.matrix.rule)
    half = isinstance(rule, MsignRule) and rule.msign_dtype in ("bfloat16", "float16")
    return "bf16" if half else "fp32"


def device_named(text: str) -> Device:
    """Return the device named `text`, or the device described by the YAML file `text`.

    Values missing from the file are taken from the device named by the key `base` in the file.
    Without `base`, missing values are taken from h100, and the device's name contains a note. The
    device's name defaults to the file's name. A `peak` with all dtypes in `REQUIRED` replaces the
    entire `peak` of the base.

    Raises InvalidConfigError if there is no such device or file, or if the file is invalid.
    """
    if text in DEVICES:
        return DEVICES[text]
    if not Path(text).is_file():
        raise InvalidConfigError([f"device must be a file or {one_of(text, DEVICES)}"])
    figures = {"name": Path(text).stem, **read_saved(Path(text))}
    peak = figures.get("peak")
    if whole := isinstance(peak, Mapping) and peak.keys() >= {*REQUIRED}:
        figures["peak"] = {**peak, REPLACE: True}  # do not inherit the base's fp8 peak
    complete = whole and figures.keys() >= vars(DEVICES["h100"]).keys()
    note = "" if complete or "base" in figures else " (remaining values from h100)"
    base = str(figures.pop("base", "h100"))
    if base not in DEVICES:
        raise InvalidConfigError([f"{text}: base must be {one_of(base, DEVICES)}"])
    try:
        device = bind(Device, over(asdict(DEVICES[base]), figures))
    except InvalidConfigError as error:
        raise InvalidConfigError([f"{text}: {line}" for line in error.problems]) from None
    return replace(device, name=device.name + note)
