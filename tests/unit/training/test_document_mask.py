"""Runs on documents packed into shared sequences: loss, resuming, and errors."""

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import Tensor

from models.families import model_size
from parallel.model import Batch, LossFunction, ParallelModel
from tests.run_configs import tiny_config
from tests.run_results import metrics_of, same_state, state_of
from tests.token_files import write_token_set
from training.build import build_trainer
from training.checkpoint.stored_checkpoint import ResumeError
from training.data.batches import as_batch
from training.data.build_data import build_data
from training.data.document_index import CROSSED
from training.data.validation_data import ValidationData
from training.dry_run import attended_length, plan_run
from training.errors import DataError
from training.loop import Loop
from training.planning.plan_screen import run_table
from training.report.log_lines import read_metrics as metrics_of_all
from training.run import train
from training.samples import next_tokens, written_documents
from training.step import mean_loss as training_loss

MASKED = {"data__document_mask": True, "data__first_token_loss": False}


@pytest.fixture
def folder(tmp_path) -> str:
    """A folder with the set `tokens`, which contains long documents, followed by documents of one
    to three tokens."""
    generator = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{tmp_path}/tokens.bin", dtype=np.uint16)
    for length in [*generator.integers(20, 90, 40), *generator.integers(1, 4, 1000)]:
        document = torch.from_numpy(generator.integers(1, 120, length).astype(np.int64))
        builder.add_document(document, [int(length)])
    builder.finalize(f"{tmp_path}/tokens.idx")
    return str(tmp_path)


def raw_losses(batch: Batch) -> LossFunction:
    """Return a loss function that returns the unweighted token losses `[b, s]` as a metric."""
    return lambda losses: (losses.mean(), {"losses": losses.detach().clone()})


def token_losses(model: ParallelModel, batch: Batch) -> Tensor:
    """Return the losses of the counted tokens in a batch."""
    options = {"microbatches": 1, "micro_batch": len(batch["tokens"]), "train": False}
    (figures,) = model.forward_backward(lambda: iter([batch]), raw_losses, **options)
    return figures["losses"][batch["counted"]]


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_every_counted_token_has_the_same_weight(micro_batch, folder, world) -> None:
    """The loss of a step is the mean over the counted tokens in its global batch, however these
    tokens are distributed over micro-batches."""
    config = tiny_config(folder, "adamw", **MASKED, train__micro_batch=micro_batch)
    data, validation = build_data(config)
    trainer = build_trainer(config, world, data, validation)
    batches = [as_batch(data[k][None], world, data.borders) for k in range(8)]
    counts = [int(batch["counted"].sum()) for batch in batches]
    assert min(counts) < 0.7 * max(counts)  # short documents in some samples
    losses = [token_losses(trainer.model, batch) for batch in batches]
    expected = torch.cat(losses).double().mean().item()
    result = trainer.step(0)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    unweighted = torch.stack([x.mean() for x in losses]).mean().item()
    assert result.loss.item() != pytest.approx(unweighted)


def test_a_z_loss_counts_the_same_tokens() -> None:
    output, weights = torch.rand(2, 3, 4), torch.rand(3, 4)
    value, figures = training_loss({"weights": weights}, z_loss=0.5)(output)
    sums = (output * weights).flatten(1).sum(1)
    torch.testing.assert_close(figures["loss"], sums)
    torch.testing.assert_close(value, sums[0] + 0.5 * sums[1])


def test_gradients_do_not_depend_on_micro_batches(folder: str, world) -> None:
    norms = []
    for micro_batch in (1, 2, 8):
        config = tiny_config(folder, "adamw", **MASKED, train__micro_batch=micro_batch)
        trainer = build_trainer(config, world, *build_data(config))
        norms.append(trainer.step(0).norm.total.item())
    # float32 sums in another order
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_a_batch_without_counted_tokens_is_no_step(folder: str, world) -> None:
    """The mean loss is undefined, so the step is skipped, counted and reported like any nonfinite
    step."""
    config = tiny_config(folder, "adamw", **MASKED)
    data, validation = build_data(config)
    trainer = build_trainer(config, world, data, validation)
    alone = torch.arange(33).expand(2, 33)  # every token begins a document
    window = torch.stack([torch.ones_like(alone), alone], 1)
    trainer.batches = iter([window] * trainer.microbatches)
    before = [part.clone() for part in trainer.model.parameters.values()]
    result = trainer.step(0)
    trainer.model.wait_for_weights()
    assert result.loss.isnan() and not result.active
    after = list(trainer.model.parameters.values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_sample_goes_on_with_the_last_document_of_its_prompt(folder: str, world) -> None:
    config = tiny_config(folder, "adamw", **MASKED)
    data, (validation,) = build_data(config)
    trainer = build_trainer(config, world, data, [validation])
    trainer.model.chunks[0].eval()
    validation.set.starts = lambda start, stop: np.array([0, 3, 5, 7])  # type: ignore[method-assign]
    firsts = written_documents(validation, 5)
    assert firsts is not None and firsts.tolist() == [0, 0, 0] + [3] * 29
    prompt = torch.from_numpy(validation.set.window(0)[:5])

    def token(written: Tensor, firsts: Tensor | None, place: int) -> int:
        windows = torch.zeros(1, 32, dtype=torch.int64)
        windows[0, : len(written)] = written
        return next_tokens(trainer.model, world, windows, place, 120, [firsts])[0].item()

    # The last document is continued as if no tokens preceded it.
    assert token(prompt, firsts, 4) == token(prompt[3:], None, 1)
    other = prompt.clone()
    other[:3] = 119 - other[:3]
    assert token(other, firsts, 4) == token(prompt, firsts, 4)


def test_a_plan_states_whose_documents_it_counts(folder: str) -> None:
    config = tiny_config(folder, "adamw", **MASKED)
    length = build_data(config)[0].attended_length()
    assert attended_length(config) == length < 32
    rows = run_table(config, plan_run(config, 1))
    assert f"as if all documents had {length:,.0f} tokens (lengths of the training sets" in rows
    crossed = tiny_config(folder)
    assert attended_length(crossed) == 32
    assert "documents" not in run_table(crossed, plan_run(crossed, 1))
    mock = tiny_config(folder, "adamw", **MASKED, data__mock=True)
    assert "lengths of mock tokens" in run_table(mock, plan_run(mock, 1))


def test_mfu_counts_visible_keys(folder: str, world) -> None:
    """The FLOPs of a step equal the FLOPs in a plan with the same sets."""
    flops = {}
    for name, keys in {"masked": MASKED, "crossed": {}}.items():
        own = {"train__exit_step": 1, "run__dir": f"{folder}/{name}"}
        config = tiny_config(folder, "adamw", **keys, **own)
        train(config, world)
        line = metrics_of_all(f"{folder}/{name}")[0]
        flops[name] = line["perf/tflops_per_gpu"] / line["perf/tokens_per_sec"]
        per_token = model_size(config.model, attended_length(config)).flops_per_token
        assert flops[name] == pytest.approx(per_token / 1e12, rel=1e-6)
    assert flops["masked"] < flops["crossed"]


def test_validation_counts_the_same_tokens(folder: str, world) -> None:
    config = tiny_config(folder, "adamw", **MASKED, validation__samples=7)
    data, validation = build_data(config)
    trainer = build_trainer(config, world, data, validation)
    batch = next(validation[0].batches(micro_batch=7, data_rank=0, data_size=1))[0]
    whole = as_batch(batch, world, data.borders)
    expected = token_losses(trainer.model, whole).double().mean().item()
    assert Loop(trainer).evaluate()["val/walk/loss"] == pytest.approx(expected, rel=1e-6)
    assert validation[0].counted_tokens == int(whole["counted"].sum())
    for samples in (1, *range(75, 90)):  # some sequences end where a document begins
        part = ValidationData(validation[0].set, samples=samples, borders=data.borders)
        batch = next(part.batches(micro_batch=samples, data_rank=0, data_size=1))[0]
        counted = as_batch(batch, world, data.borders)["counted"]
        assert part.counted_tokens == int(counted.sum()), samples


def test_a_resumed_run_is_the_continuous_one_bit_for_bit(folder: str, world) -> None:
    keys: dict[str, Any] = MASKED | {"train__steps": 4, "log__interval": 1}
    keys |= {"checkpoint__interval": 2, "train__micro_batch": 4}
    lines = {}
    for name, stops in {"continuous": [4], "resumed": [2, 4]}.items():
        for stop in stops:
            run = {"run__dir": f"{folder}/{name}", "train__exit_step": stop}
            train(tiny_config(folder, "adamw", **keys, **run), world)
        lines[name] = [line for line in metrics_of(f"{folder}/{name}") if line["step"] > 2]
    assert len(lines["continuous"]) == 2 and lines["continuous"] == lines["resumed"]
    states = (state_of(f"{folder}/{name}", 4) for name in lines)
    assert same_state(*states) == []


def test_a_run_does_not_continue_with_other_borders(folder: str, world) -> None:
    keys = {"train__steps": 4, "train__exit_step": 1, "checkpoint__interval": 1}
    keys["train__micro_batch"] = 8
    train(tiny_config(folder, "adamw", **keys), world)
    keys["train__exit_step"] = 2
    changed = {key: MASKED[key] for key in ("data__document_mask", "data__first_token_loss")}
    for key, value in changed.items():
        name = key.removeprefix("data__")
        with pytest.raises(ResumeError, match=f"differs in its data: {name} was"):
            train(tiny_config(folder, "adamw", **keys, **{key: value}), world)
    keys["checkpoint__allow_change"] = "[data]"
    train(tiny_config(folder, "adamw", **keys, **changed), world)


def test_without_them_a_batch_is_what_it_was(folder: str, world) -> None:
    data, (validation,) = build_data(tiny_config(folder))
    assert data.borders == validation.borders == CROSSED and data[0].shape == (33,)
    assert as_batch(data[0][None], world, data.borders).keys() == {"tokens", "labels"}


def test_a_set_of_one_document_is_refused(folder: str, world) -> None:
    builder = IndexedDatasetBuilder(f"{folder}/one.bin", dtype=np.uint16)
    builder.add_document(torch.arange(400) % 120, [400])
    builder.finalize(f"{folder}/one.idx")
    one = {"data__train__walk__path": f"{folder}/one"}
    with pytest.raises(
        DataError, match="token set walk: .*one.idx must contain at least two documents"
    ):
        build_data(tiny_config(folder, **one, data__document_mask=True))
    build_data(tiny_config(folder, **one))


def test_a_plan_counts_the_documents_of_all_phases(folder: str, tmp_path) -> None:
    """Half of the steps read only short documents, and the other half only long documents."""
    for name, documents in (("short", 1_000), ("long", 20)):
        write_token_set(tmp_path / name, tokens=8_000, vocab=120, seed=0, documents=documents)
    sets = {f"data__train__{name}__path": tmp_path / name for name in ("short", "long")}
    keys = {**sets, "data__train__walk": "null", "data__document_mask": True}
    short, long = (
        attended_length(tiny_config(folder, "adamw", **keys, **{f"data__train__{other}": "null"}))
        for other in ("long", "short")
    )
    assert short < long
    keys |= {"data__train__long__weight": 0}
    keys["data__phases"] = "[{after_share: 0.5, weights: {long: 1}}]"
    found = attended_length(tiny_config(folder, "adamw", **keys))
    assert found == pytest.approx((short + long) / 2, rel=1e-9)
