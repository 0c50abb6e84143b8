"""If a bit of a weight flips between steps, the run ends within `watchdog.replica_interval` steps,
and the error names the weight."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from tests.slow_cases import slow_but
from tests.token_files import write_token_set

WORKERS = "tests.distributed.run_workers"
WATCHED = {"watchdog__replica_interval": 4, "train__steps": 5, "log__interval": 100}
BF16 = WATCHED | {"train__precision": "bf16"}
CASES = {
    "nothing": ("nothing", BF16),
    "a parameter in float32": ("parameter", WATCHED),
    "a master": ("master", BF16),
    "a weight that its owner keeps": ("kept", BF16),
    "the weight of a PC layer": ("PC layer", BF16 | {"pc__level": 2}),
}
KINDS = {"parameter": "parameter", "master": "master", "kept": "owner's", "PC layer": "owner's"}


@pytest.fixture(scope="module", params=slow_but([{}], [{}, {"tensor": 2}]), ids=str)
def found(request, tmp_path_factory):
    """For each case, the rank with the flipped bit, the last step and the error of each rank, and
    the changed weight."""
    folder = tmp_path_factory.mktemp("flips")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    tiny_config(str(folder), "spectral_sphere")
    layout = {f"parallel__{axis}": size for axis, size in request.param.items()}
    cases = {name: (what, keys | layout) for name, (what, keys) in CASES.items()}
    arguments = {"folder": str(folder), "layout": request.param, "cases": cases}
    return run_on_ranks(2, WORKERS, "flips", arguments)


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_ends_the_run_and_is_named(found, case):
    what, _ = CASES[case]
    for each in found:
        rank, step, said, name = each[case]
        if case == "nothing":
            assert (rank, step, said, name) == (-1, 5, "", None)
        else:
            assert rank >= 0 and step == 4
            assert said.startswith(f"weights were modified outside optimizer steps: rank {rank} (")
            assert f"{KINDS[what]} {name}" in said.split(";")[0]
