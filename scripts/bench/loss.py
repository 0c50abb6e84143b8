"""Memory and time of head and loss of one micro-batch: all logits at once, and chunks of them.

    python scripts/bench/loss.py --tokens 512 --hidden 256 --vocabulary 100352 --chunks 16384 4096

Forward and backward from hidden states to losses, by Megatron's own loss and by `train.loss_chunk`,
bfloat16 as in training. Bytes are those of tensors that the call created, at the worst moment, the
gradients of head and hidden states included; they are counted and the same on any machine. Time is
processor time on a CPU, else that of the device.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.blocks.chunked_loss import linear_cross_entropy  # noqa: E402
from parallel.comm import groups as process_groups  # noqa: E402
from scripts.bench.live_bytes import peak_bytes  # noqa: E402


def seconds(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The best time of a call."""
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return best


def main(arguments: list[str] | None = None) -> None:
    """Print a line for the whole loss and one for each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=100_352)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16_384, 4_096])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device = process_groups.initialize().device
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=torch.bfloat16)
    head = 0.02 * torch.randn(options.vocabulary, options.hidden, device=device).bfloat16()
    labels = torch.randint(options.vocabulary, (options.tokens,), device=device)
    hidden.requires_grad_()
    head.requires_grad_()

    def run(chunk: int | None) -> None:
        hidden.grad = head.grad = None
        if chunk is None:
            losses = vocab_parallel_cross_entropy(hidden @ head.T, labels)
        else:
            losses = linear_cross_entropy(hidden, head, labels, chunk=chunk, group=None)
        losses.mean().backward()

    for chunk in (None, *options.chunks):
        call = partial(run, chunk)
        call()
        print(
            f"{'all at once' if chunk is None else f'chunks of {chunk}':<18}"
            f"{peak_bytes(call) / 2**20:10.1f} MiB{seconds(call, device, options.repeats):10.3f} s",
            flush=True,
        )
    process_groups.shutdown()


if __name__ == "__main__":
    main()
