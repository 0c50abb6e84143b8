"""Messages about ranks that differ, the facts that are compared, and restarts that are rejected."""

import shutil
import socket
import time

import pytest

from parallel.comm.collectives import CollectiveError, differing
from parallel.comm.groups import shutdown
from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.errors import ConfigError
from training.machine.start import RENDEZVOUS, check_restarts, source_hash, start_groups


def test_the_ranks_that_differ_are_those_that_few_agree_with() -> None:
    facts = [{"seed": 1}, {"seed": 7}, {"seed": 7}, {"seed": 7}]
    hosts = ["a", "b", "c", "d"]
    said = "seed differs between ranks: 1 on rank 0 (host a), 7 on"
    assert [*differing(facts, hosts)] == [f"{said} the other 3 ranks"]
    assert [*differing(facts[:2], hosts)] == [f"{said} rank 1 (host b)"]
    many = [{"seed": 7}] * 30 + [{}] * 20
    (line,) = differing(many, ["a"] * 50)
    assert line.startswith("seed differs between ranks: absent on rank 30 (host a)")
    assert line.endswith("rank 37 (host a) and 12 more, 7 on the other 30 ranks")


@pytest.mark.parametrize("name", ["kernels/dispatch.py", "kernels/table.json"])
def test_ranks_with_other_code_or_kernels_differ(name: str, tmp_path) -> None:
    shutil.copytree(ROOT / "spectral", tmp_path / "spectral")
    before = source_hash(tmp_path / "spectral")
    with (tmp_path / "spectral" / name).open("a") as file:
        file.write("\n")
    assert before == source_hash(ROOT / "spectral") != source_hash(tmp_path / "spectral")


def test_a_missing_rank_is_named_and_waited_for_a_limited_time(folder, monkeypatch, capfd) -> None:
    config = tiny_config(folder, "muon", parallel__timeout_seconds=1)
    for name in ("LOCAL_RANK", *RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    needed = "WORLD_SIZE = 2 requires {} to be set: launch with torchrun"
    with pytest.raises(ConfigError, match=needed.format("MASTER_ADDR, MASTER_PORT, RANK")):
        start_groups(config)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match=needed.format("MASTER_PORT, RANK")):
        start_groups(config)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("training.machine.start.PATIENCE", 0.1)
    ranks = f"all 2 ranks (WORLD_SIZE) {{}} at 127.0.0.1:{port}"
    with pytest.raises(CollectiveError) as caught:
        start_groups(config)
    message = ranks.format("must connect") + " within parallel.timeout_seconds = 1: "
    assert str(caught.value).startswith(message)
    assert f"waiting for {ranks.format('to connect')} (parallel.time" in capfd.readouterr().out


def test_a_single_rank_ignores_the_address_of_other_programs(folder, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    groups = start_groups(tiny_config(folder, "muon"))
    assert groups.rank == 0
    shutdown()


def test_a_single_rank_waits_for_no_other(folder, monkeypatch, capfd) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("training.machine.start.PATIENCE", 0.0)
    monkeypatch.setattr("training.machine.start.initialize", lambda *_, **__: time.sleep(0.05))
    start_groups(tiny_config(folder, "muon"))
    assert "waiting" not in capfd.readouterr().out


SHARED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "GROUP_WORLD_SIZE": "2",
}


@pytest.mark.parametrize(("name", "value"), [*zip(SHARED, ("False", "0", "1"), strict=True)])
def test_restarts_on_several_nodes_with_one_store_are_refused(name, value, monkeypatch) -> None:
    for key, each in SHARED.items():
        monkeypatch.setenv(key, each)
    with pytest.raises(ConfigError, match="TCP_STORE must be 1 .* on several nodes, got nothing"):
        check_restarts()
    monkeypatch.setenv(name, value)
    check_restarts()
