"""Samples of text are the same on any layout."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from tests.token_files import write_token_set

LAYOUTS = [
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "context": 2},
]
# 119 of 120 rows of the vocabulary are tokens; four layers for two chunks of each stage.
CHANGES = (("vocab_size: 120", "vocab_size: 119"), ("layers: 2", "layers: 4"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_token_set(folder / "tokens", tokens=2_000, vocab=119, seed=0)
    return folder


@pytest.mark.slow
def test_every_layout_writes_the_tokens_of_one_process(folder):
    tiny_config(str(folder))
    text = (folder / "config.yaml").read_text()
    for old, new in CHANGES:
        assert old in text
        text = text.replace(old, new)
    (folder / "config.yaml").write_text(text)
    module = "tests.distributed.sample_workers"
    (alone,) = run_on_ranks(1, module, "continuations", {"folder": str(folder), "layouts": [{}]})
    ranks = run_on_ranks(4, module, "continuations", {"folder": str(folder), "layouts": LAYOUTS})
    assert len({token for row in alone[0] for token in row}) > 5
    for rank in ranks:
        assert rank == alone * len(LAYOUTS)
