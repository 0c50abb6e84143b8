"""Faults that runs on CPUs do not reveal. A rehearsal of the broken program finds each of them."""

from functools import partial

import pytest

from tests.rehearsal import mutants
from tests.rehearsal.programs import H100, BrokenJob, plain_waits, program
from training.dry_run import plan_run
from training.rehearsal.rehearse import Report

SLOW = partial(pytest.param, marks=pytest.mark.slow)
SHALLOW = {"model__layers": 1}


def broken(perform, config, mutant):
    """Return the report of rank 0 of 2, with the program broken by `mutant`."""
    (report,) = perform([BrokenJob(config, 2, 0, H100, before=getattr(mutants, mutant))])
    return report


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        SLOW("no_wait_for_weights", "all_gather"),
        SLOW("no_wait_for_gradients", "reduce_scatter"),
        SLOW("streams_are_not_joined", "memory without waiting for"),
        ("streams_do_not_wait", "memory without waiting for"),
    ],
)
def test_accesses_in_no_order_are_found(mutant, words, perform, tmp_path):
    config = program(tmp_path, 2, **SHALLOW)
    report = broken(perform, config, mutant)
    assert report.findings and any(words in finding for finding in report.findings)
    assert "unordered accesses" in (Report(plan_run(config, 2), [report]).error or "")


@pytest.mark.parametrize(
    ("mutant", "words", "changes"),
    [
        SLOW("generators_are_not_seeded", "is not added", {"parallel__tensor": 2}),
        SLOW("loss_stays_on_the_host", "over nccl does not support tensors on cpu", {}),
        SLOW("batches_stay_on_the_host", "device", {}),
        (
            "step_reads_in_a_graph",
            "during CUDA graph capture",
            {
                "optimizer__distributed__cuda_graph": True,
                "optimizer__distributed__overlap_gather": False,
            },
        ),
    ],
)
def test_what_a_gpu_refuses_is_an_error_with_its_place(mutant, words, changes, perform, tmp_path):
    config = program(tmp_path, 2, **SHALLOW | changes)
    report = broken(perform, config, mutant)
    assert report.error is not None and words in report.error and "(at " in report.error


@pytest.mark.parametrize(
    ("mutant", "place", "changes"),
    [
        ("host_looks_at_the_loss", "item at tests/rehearsal/mutants.py", {}),
        SLOW("batches_are_pageable", "copy to the device at", {}),
        SLOW(
            "pipelines_wait_for_the_device",
            "cuda.synchronize at megatron/core/pipeline_parallel/p2p_communication.py",
            {"model__layers": 4, "parallel__pipeline": 2},
        ),
    ],
)
def test_waits_of_the_host_are_found(mutant, place, changes, perform, tmp_path):
    config = program(tmp_path, 2, **SHALLOW | changes)
    report = broken(perform, config, mutant)
    assert any(each.startswith(place) for each in plain_waits(report)), report.error


@pytest.mark.parametrize(
    ("mutant", "found"), [SLOW("user_wants_tf32", 0), ("optimizer_in_tf32", 1)]
)
def test_products_of_the_optimizer_are_ieee_under_any_forward_pass(
    mutant, found, perform, tmp_path
):
    keys = {"pc__level": 2, "train__precision": "fp32"}
    config = program(tmp_path, 2, rule="spectral_sphere", **SHALLOW, **keys)
    report = broken(perform, config, mutant)
    said = [finding for finding in report.findings if "multiplies float32 in TF32" in finding]
    assert bool(said) is bool(found) and len(said) == len(report.findings), report.findings
