"""The optimizers with FSDP2, HSDP, tensor parallelism and DDP, compared with one process."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks

RULES = ["adamw", "muon", "normuon", "adamuon", "muon_sphere", "spectral_sphere", "muon_plus_plus"]
WORKERS = "tests.distributed.sharded_workers"
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
"""Tolerance for float64 weights near 1 after three steps with a different summation order."""


FAST: list[tuple[int, str, list[str], bool]] = [
    (2, "fsdp", [*RULES, "muon rates", "spectral_sphere rates"], False),
    (2, "tp", ["adamw", "muon cautious", "spectral_sphere"], False),
    (2, "ddp", ["muon", "muon cautious"], False),
    (4, "hsdp", ["spectral_sphere"], False),  # one shard is empty
    (2, "fsdp", ["adamw", "spectral_sphere"], True),
    (4, "tp_fsdp", ["muon_plus_plus"], True),
]
"""Number of ranks, kind of sharding, rules, and whether the model has PC layers."""
SLOW: list[tuple[int, str, list[str], bool]] = [
    (4, "fsdp", RULES, False),
    (4, "tp_fsdp", RULES, False),
    (4, "hsdp", RULES, True),
    (2, "tp", RULES, True),
]


def on_ranks(ranks: int, cases: list[tuple[int, str, list[str], bool]]) -> list[list[Any]]:
    """Return the results of each case on all ranks, in order. `ranks` may be 1."""
    given = [("one" if ranks == 1 else how, rules, pc) for _, how, rules, pc in cases]
    return list(zip(*run_on_ranks(ranks, WORKERS, "curves", {"cases": given}), strict=True))


@pytest.fixture(scope="module")
def fast() -> list[tuple[Any, Any]]:
    """Results of each fast case in one process and on several ranks."""
    shared = {n: iter(on_ranks(n, [case for case in FAST if case[0] == n])) for n in (2, 4)}
    alone = on_ranks(1, FAST)
    return [(one, next(shared[case[0]])) for case, (one,) in zip(FAST, alone, strict=True)]


@pytest.mark.parametrize("case", range(len(FAST)), ids=lambda i: str(FAST[i]))
def test_ranks_together_equal_one_process(fast: list[tuple[Any, Any]], case: int) -> None:
    compare(*fast[case], pc=FAST[case][-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more_ranks_and_rules_equal_one_process(case: tuple[int, str, list[str], bool]) -> None:
    ((alone,),), (results,) = on_ranks(1, [case]), on_ranks(case[0], [case])
    compare(alone, results, pc=case[-1])


def compare(alone: dict[str, Any], results: list[dict[str, Any]], *, pc: bool) -> None:
    """Compare the results of a case on all ranks with one process."""
    for rule, expected in alone.items():
        for result in results:
            torch.testing.assert_close(result[rule]["weights"], expected["weights"], **CLOSE)
            assert any(name.endswith(".gamma") for name in result[rule]["weights"]) is pc
        stepped = Counter[tuple[int, ...]]()
        for result in results:
            stepped.update({tuple(shape): n for *shape, n in result[rule]["stepped"]})
        once = {tuple(shape): n for *shape, n in expected["stepped"]}
        assert stepped == once, "each matrix is stepped once in the whole world"


SHARES = {"muon": 0.25, "normuon": 0.3, "spectral_sphere": 0.62}
"""Bytes of a 16-bit exchange divided by the bytes of a 64-bit exchange. SSO also sends exact
weights and vectors, and NorMuon sends mean squares."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "merged under tp": ("merged", {"how": "tp"}),
    "merged under fsdp": ("merged", {"how": "fsdp"}),
    "placed_gradients": ("placed_gradients", {}),
    "refusals": ("refusals", {}),
    "unfit": ("unfit", {"how": "fsdp", "rules": RULES}),
    "rounded": ("rounded", {"rules": list(SHARES)}),
    "clipped": ("clipped", {}),
    "skipped": ("skipped", {}),
    "written": ("written", {"how": "fsdp"}),
}
"""Functions that two ranks call one after the other, and their arguments."""


@pytest.fixture(scope="module")
def on_two() -> dict[str, list[Any]]:
    """Results of each call on both ranks."""
    results = run_on_ranks(2, WORKERS, "in_turn", {"calls": list(CALLS.values())})
    return dict(zip(CALLS, zip(*results, strict=True), strict=True))


def test_pc_layers_of_tensor_parallel_ranks_are_merged(on_two) -> None:
    for left, change in on_two["merged under tp"]:
        assert left == [] and change < 1e-12  # float64
    for merging, converting in on_two["merged under fsdp"]:
        assert (
            merging
            == "merge_ requires an unsharded model; load the state into an unsharded model first"
        )
        assert converting.endswith(" is already sharded; call preconditioned before fully_shard")


def test_a_checkpoint_continues_on_another_mesh(fast, tmp_path) -> None:
    rules = ["adamw", "spectral_sphere"]
    shared = {"rules": rules, "folder": str(tmp_path)}
    run_on_ranks(4, WORKERS, "save", {"how": "hsdp", **shared})
    for ranks, how in ((2, "fsdp"), (1, "one")):
        for results in run_on_ranks(ranks, WORKERS, "resume", {"how": how, **shared}):
            for rule, weights in zip(rules, results, strict=True):
                torch.testing.assert_close(weights, fast[0][0][rule]["weights"], **CLOSE)


def test_a_gradient_may_have_any_placement(on_two) -> None:
    """With placement Partial, as under sequence parallelism, the gradient is the sum of the tensors
    on all ranks."""
    assert on_two["placed_gradients"] == ([], [])


def test_wrong_use_is_one_clear_error(on_two) -> None:
    owners = ("a gradient on another rank", "the gradient of blocks.0.down.weight")
    results = on_two["refusals"]
    assert [said.pop()[:37] for said in results] == ["replicas is None, so each of 2 ranks ", ""]
    for owner, said in zip(owners, results, strict=True):
        meshes, placement, vector, *gradients, nonfinite, unreduced = said
        assert "must all be on the same device mesh" in meshes
        assert "must be sharded or replicated, got P" in placement
        assert "at least 2 dimensions, got shape (4,)" in vector
        assert gradients == 4 * ["all ranks must have gradients for the same parameters"]
        assert nonfinite == f"{owner} is not finite; no parameter was updated"
        assert "more differs between the ranks of `replicas`; average gradients" in unreduced


def test_a_process_group_may_be_destroyed_and_made_again(tmp_path: Path) -> None:
    shared = {"folder": str(tmp_path)}
    assert run_on_ranks(2, WORKERS, "restarted", shared) == 2 * [[True, True]]


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_has_changed(on_two) -> None:
    for rank, results in enumerate(on_two["unfit"]):
        for loaded, *cut in results:
            own = "momentum of parameter 1 must be finite"
            assert loaded == (own if rank else "another rank cannot load its part of the state")
            (said,) = cut
            assert said.startswith("momentum of ") and "sharded without its state" in said


def test_momenta_and_updates_are_sent_in_16_bits(on_two) -> None:
    for found in on_two["rounded"]:
        for (distance, part, exact), share in zip(found, SHARES.values(), strict=True):
            assert exact
            # bfloat16 rounds by 2^-9; msign may amplify that at small singular values.
            assert 0 < distance < 0.1
            assert abs(part - share) < 0.02


def test_sharded_queries_and_keys_are_clipped_as_whole_ones(on_two) -> None:
    assert on_two["clipped"] == ([True] * 4, [True] * 4)


def test_all_ranks_skip_a_step_that_one_cannot_take(on_two) -> None:
    """If the owner of a matrix refuses its update, all ranks skip the step of this matrix,
    including weight decay."""
    assert on_two["skipped"] == 2 * ([True, 1, []],)


def test_what_others_write_into_16_bits_is_stepped(on_two) -> None:
    assert on_two["written"] == (True, True)
