"""Measure the training speed of a recipe: tokens/s, MFU, memory, and each phase's share of a step.

    python scripts/bench/train.py --config configs/tiny_sso.yaml --steps 10 --json out.json
    torchrun --nproc-per-node 8 scripts/bench/train.py --config configs/llama1b_muon.yaml

The trainer is that of pretrain.py, built from the config and its `key=value` overrides; nothing is
saved or validated. `--synthetic` trains on random tokens and reads no data.

MFU is model FLOPs per token (models/size.py: 6 per parameter of an active matrix, causal attention;
recomputation does not count) times tokens per second and device, over the device's dense bfloat16
peak (NVIDIA's data sheets, training/report/metrics.py; H100 SXM and H200: 989e12). Other devices
need --peak-flops, without which MFU is null. Phases are timed by events on a GPU, which no step
waits for, and by the clock on a CPU; steps include the logging that the config asks for.

--profile writes a trace of one step and counts, on a GPU, how often the host waits in it. Without a
GPU a rehearsal says where the host would wait (docs/rehearsal.md).
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from models.size import model_size
from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from scripts.bench.phases import PHASES, Phases, watch
from scripts.bench.record import record, write_json
from scripts.bench.trainer import new_trainer, start
from scripts.command import add_config, add_json, command
from spectral.kernels import device_name
from training.build import with_vocabulary
from training.config import load_config
from training.loop import Trainer
from training.report.metrics import peak_flops, performance

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps to measure (default: 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default: 3)")
    parser.add_argument("--synthetic", action="store_true", help="train on random tokens")
    parser.add_argument("--peak-flops", type=float, help="dense bf16 peak of one device (FLOP/s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of one step")
    add_json(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    return options


def measure(trainer: Trainer, steps: int, warmup: int) -> dict[str, Any]:
    """Seconds per step, seconds per step of each phase, and peak memory of this rank."""
    device = trainer.groups.device
    phases = Phases(device)
    watch(trainer, phases)
    for _ in range(warmup):
        trainer.advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    phases.restart()
    for _ in range(steps):
        trainer.advance()
    found = {name: value / steps for name, value in phases.seconds().items()}
    seconds = (time.perf_counter() - begun) / steps
    return {"seconds": seconds, "phases": found, "peak_bytes": peak_bytes(device)}


def peak_bytes(device: torch.device) -> int:
    """The peak of allocated memory on a GPU since its reset, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def summary(trainer: Trainer, ranks: list[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Figures over all ranks: time and memory are the largest, phases are means."""
    config, groups = trainer.config, trainer.groups
    tokens = config.train.global_batch * config.train.sequence_length
    flops = model_size(config.model, config.train.sequence_length).flops_per_token
    seconds = max(rank["seconds"] for rank in ranks)
    speed = performance(
        tokens=tokens, seconds=seconds, devices=len(ranks), flops_per_token=flops, peak=peak
    )
    phases = {name: sum(rank["phases"][name] for rank in ranks) / len(ranks) for name in PHASES}
    total = sum(phases.values())
    mfu = speed.get("perf/mfu")
    return {
        "tokens_per_second": speed["perf/tokens_per_sec"],
        "tokens_per_second_per_device": speed["perf/tokens_per_sec_per_gpu"],
        "mfu": None if mfu is None else mfu / 100,
        "seconds_per_step": seconds,
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "peak_flops": peak,
        "peak_memory_bytes": max(rank["peak_bytes"] for rank in ranks),
        "ranks": len(ranks),
        "layout": {
            "data": groups.data.size,
            "tensor": groups.tensor.size,
            "pipeline": groups.pipeline.size,
            "context": groups.context.size,
            "expert": groups.expert.size,
            "expert_tensor": groups.experts.tensor.size,
        },
        "phase_seconds": phases,
        "phase_shares": {name: each / total for name, each in phases.items()},
    }


def profile(trainer: Trainer, trace: Path) -> dict[str, Any]:
    """Write the trace of a step that is not logged on rank 0, and count where it makes the host
    wait for a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = trainer.groups.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.step(trainer.progress.step)
    if trainer.groups.rank == 0:
        profiler.export_chrome_trace(str(trace))
    if not on_gpu:
        return {}
    counts = {event.key: event.count for event in profiler.key_averages()}
    places = {k: n for k, n in counts.items() if any(wait in k for wait in WAITS)}
    return {"host_reads": sum(places.values()), "host_read_places": places}


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    mfu = "unknown" if result["mfu"] is None else f"{100 * result['mfu']:.1f}%"
    print(
        f"{result['tokens_per_second']:,.0f} tokens/s on {result['ranks']} x {result['device']}, "
        f"{1000 * result['seconds_per_step']:.1f} ms per step, MFU {mfu}, "
        f"peak {result['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for name, share in result["phase_shares"].items():
        print(f"{name:<20}{1000 * result['phase_seconds'][name]:10.2f} ms{100 * share:8.1f}%")
    for place, count in result.get("host_read_places", {}).items():
        print(f"the host waits {count} times: {place}")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write the result on rank 0."""
    options = parse(arguments)
    config = load_config(options.config, options.overrides)
    steps = options.warmup + options.steps
    # The last step of a run is logged, so the measured ones must not include it.
    train = replace(config.train, steps=max(config.train.steps, steps + 3), exit_step=None)
    config = with_vocabulary(replace(config, train=train))
    groups = start(config)
    try:
        trainer = new_trainer(config, groups, synthetic=options.synthetic)
        own = measure(trainer, options.steps, options.warmup)
        peak = options.peak_flops or peak_flops(device_name(groups.device))
        result = summary(trainer, from_all(own), peak)
        if options.profile is not None:
            result |= profile(trainer, options.profile)
        result |= {"warmup": options.warmup, "steps": options.steps}
        if groups.rank == 0:
            result = record("scripts/bench/train.py", arguments, groups.device, result)
            show(result)
            write_json(options.json, result)
    finally:
        process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
