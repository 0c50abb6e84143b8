"""Ranks with different settings or data report the difference and exit before the first step."""

import pytest
from tokenizers import Tokenizer, models

from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from tests.token_files import write_manifest, write_token_set
from training.report.log_lines import read_lines

WORKERS = "tests.distributed.agreement_workers"
TIMEOUT = 400
"""Time limit in seconds. It is below parallel.timeout_seconds = 600, so no rank may wait for that
timeout."""
CASES = {
    "optimizer.matrix.lr": (["optimizer.matrix.lr=0.5"], "0.5"),
    "data.train.walk.weight": (["data.train.walk.weight=2"], "2.0"),
    "parallel.tensor": (["parallel.tensor=2"], "2"),
    "resume": (["--resume", "none"], "'none'"),
}


@pytest.fixture(scope="module")
def folder(shared_folder):
    """Token sets of the same sizes, and a config."""
    tiny_config(str(shared_folder), "adamw")
    return shared_folder


def on_two_ranks(function: str, place, **arguments):
    """Return the results of a worker function on two ranks, for the config in a folder."""
    given = {"config": f"{place}/config.yaml", **arguments}
    return run_on_ranks(2, WORKERS, function, given, timeout=TIMEOUT)


def test_settings_that_differ_are_named(folder):
    overrides = [[[], arguments] for arguments, _ in CASES.values()]
    said = on_two_ranks("each_started", folder, overrides=overrides)
    for (key, (_, value)), (code, text), (other, _) in zip(CASES.items(), *said, strict=True):
        assert (code, other) == (2, 2) and text.count("\n") == 1, key
        assert text.startswith(f"error: {key} differs between ranks: ")
        assert f", {value} on rank 1 (host " in text
    assert not (folder / "run").exists()


def prepared(folder, seed: int = 0, word: str = "the", **manifest) -> None:
    """Write the set `a`, a tokenizer, and a manifest without hashes."""
    folder.mkdir(parents=True)
    write_token_set(folder / "a", tokens=1_000, vocab=120, seed=seed)
    Tokenizer(models.WordLevel({word: 0}, unk_token=word)).save(str(folder / "tokenizer.json"))
    write_manifest(folder, **{"max_token": 119, **manifest})


def test_data_that_differ_are_named(folder):
    """Two nodes may have different unverified copies under the same path."""
    copies = {
        "data.walk.content": {"seed": 1},
        "content of the tokenizer": {"word": "a"},
        "bytes of a in its manifest": {"bytes": 4001},
    }
    for name, changed in copies.items():
        prepared(folder / name / "0")
        prepared(folder / name / "1", **changed)
    folders = [str(folder / name) for name in copies]
    said, _ = on_two_ranks("on_own_data", folder, folders=folders, name="a")
    for name, (code, text) in zip(copies, said, strict=True):
        first = text.partition("\n")[0]
        assert code == 2 and first.startswith(f"error: {name} differs between ranks: "), text
        assert "rank 1" in first
    assert not (folder / "run").exists()


def test_a_rank_with_an_error_of_its_own_names_itself(folder):
    """The other ranks are still waiting for the rank that exited. torchrun stops them."""
    with pytest.raises(AssertionError) as failed:
        on_two_ranks("ended", folder, overrides=[[], ["train.stepz=3"]])
    assert "rank 1 exited with 2" in str(failed.value)
    assert "error: rank 1 (host " in str(failed.value)
    assert "unknown key train.stepz" in str(failed.value)


@pytest.mark.slow
def test_the_rank_that_hangs_is_named(folder):
    """After a minute, every other rank and events.jsonl name the rank that hangs."""
    said = run_on_ranks(3, WORKERS, "with_a_hanging_rank", {"folder": str(folder)})
    for rank in (0, 2):
        assert f"failed on rank {rank}" in said[rank]
        assert said[rank].count("; no answer from rank 1 (host ") == 1
    last = read_lines(folder / "run" / "events.jsonl").lines[-1]
    assert last["kind"] == "failed" and last["text"] == said[0]
    assert (last["error"], last["rank"]) == ("CollectiveError", 0)
    assert last["absent"] == [{"rank": 1, "host": last["host"]}]


def test_a_rank_that_fails_says_why_and_nobody_waits_for_it(folder):
    """With gloo, the other ranks immediately detect that a rank has exited. With NCCL, the watchdog
    stops them."""
    others, failed = on_two_ranks("with_a_failing_rank", folder)
    assert [failed[0], others[0]] == [1, 1]
    assert failed[1] == "error: out of memory: as on a GPU that is full\n"
    assert others[1].startswith("error: ") and "Traceback" not in others[1]
    assert others[1].count("; no answer from rank 1 (host ") == 1
