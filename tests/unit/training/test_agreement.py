"""What ranks must agree on: each key of the config, the code, and how a difference is said."""

from pathlib import Path

import pytest
import yaml

from parallel.comm.agreement import differing
from tests.config_values import Keys, another, get, leaves, replaced, type_of
from tests.run_configs import tiny_config
from tests.unit.training.checkpoint.test_identity import EVERY_SECTION
from training.agreement import require_agreement, settings
from training.config import InvalidConfigError, load_saved_config, to_yaml

DECIDES: dict[str, tuple[str, ...]] = {
    "pc.polynomial.kind": ("pc.level",),
    "pc.learnable_gamma": ("pc.gamma_weight_decay",),
}
"""Keys that a key makes null or a number."""


@pytest.mark.slow
def test_another_value_of_any_key_is_named_with_its_rank(tmp_path: Path) -> None:
    """Each key of the schema, on one of three ranks."""
    config = tiny_config(str(tmp_path), "muon", **EVERY_SECTION)
    usual = settings(config)
    content = yaml.safe_load(to_yaml(config))
    paths = list(leaves(content))
    assert len(paths) > 180
    refused: list[Keys] = []
    for path in paths:
        changed = another(type_of(path), get(content, path))
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(replaced(content, path, changed)))
        try:
            other = settings(load_saved_config(tmp_path / "other.yaml"))
        except InvalidConfigError as error:
            # A rule refuses it beside its other settings: no rank gets as far as to disagree.
            assert str(error).startswith(".".join(path)), path
            refused.append(path)
            continue
        lines = list(differing([usual, other, usual], ["a", "b", "c"]))
        assert lines and all("rank 1 (host b)" in line for line in lines), path
        key = ".".join(path)
        assert any(line.startswith(key) for line in lines), lines
        may = (key, *DECIDES.get(key, ()))
        assert all(line.startswith(may) for line in lines), lines
    assert len(refused) < 5


def test_the_ranks_that_differ_are_those_that_few_agree_with() -> None:
    facts = [{"seed": 1}, {"seed": 7}, {"seed": 7}, {"seed": 7}]
    hosts = ["a", "b", "c", "d"]
    assert list(differing(facts, hosts)) == [
        "seed differs between ranks: 1 on rank 0 (host a), 7 on the other 3"
    ]
    assert list(differing(facts[:2], hosts)) == [
        "seed differs between ranks: 1 on rank 0 (host a), 7 on rank 1 (host b)"
    ]
    many = [{"seed": 7}] * 30 + [{}] * 20
    (line,) = differing(many, ["a"] * 50)
    assert line.startswith("seed differs between ranks: absent on rank 30 (host a)")
    assert line.endswith("rank 37 (host a) and 12 more, 7 on the other 30")


@pytest.mark.usefixtures("world")
def test_one_rank_agrees_with_itself() -> None:
    require_agreement({"seed": 1, "pc": None})
