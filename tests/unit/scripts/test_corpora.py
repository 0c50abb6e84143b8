"""Every recipe names a command to create its data, and this command creates the data."""

import re

import pytest

from scripts.data.corpora import read_corpora
from scripts.data.set_writer import token_dtype
from scripts.prepare_data import parse
from tests.paths import ROOT
from training.config import load_config

CORPORA = read_corpora()
RECIPES = sorted({*ROOT.glob("configs/*.yaml")} - {*ROOT.glob("configs/tiny_*.yaml")})
MADE_BY = re.compile(r"scripts/prepare_data\.py (.*) \((\d+) GB, (\d+) core hours\)")
TOKENS_PER_CORE_SECOND = 0.78e6
"""Measured with the embedded corpus and its tokenizer."""


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_recipe_makes_its_sets(path) -> None:
    config = load_config(path, [])
    assert config.data.made_by is not None
    said = MADE_BY.fullmatch(config.data.made_by)
    assert said is not None
    options = parse(said[1].split())
    corpus = CORPORA[options.corpus]
    ((_, train),) = config.data.train.items()
    ((_, validation),) = config.data.validation.items()
    assert train.path == f"{options.output}/{corpus.name}.train"
    assert validation.path == f"{options.output}/{corpus.name}.validation"
    # No token is seen twice, and the held-out part is long enough for validation.
    length = config.train.sequence_length
    tokens = options.tokens or corpus.tokens
    held_out = tokens * corpus.validation
    assert config.train.steps * config.train.global_batch * length <= tokens - held_out
    assert (config.validation.samples or 0) * length <= held_out
    assert config.model.vocab_size is not None
    width = {"uint16": 2, "int32": 4}[token_dtype(config.model.vocab_size)]
    assert int(said[2]) == round(tokens * width / 1e9)
    hours = tokens / TOKENS_PER_CORE_SECOND / 3600
    assert int(said[3]) == pytest.approx(hours, rel=0.05)


def test_parts_have_their_shares_of_the_tokens(tmp_path) -> None:
    corpus = CORPORA["olmo_mix"]
    for part in corpus.parts:
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "part.jsonl").write_text('{"text": "A document"}\n')
    portions = corpus.set_plan(100_000, tmp_path).portions
    tokens = [portion.tokens or 0 for portion in portions]
    assert sum(tokens) == pytest.approx(100_000, abs=7)
    for part, portion in zip(corpus.parts, portions, strict=True):
        assert str(tmp_path / part) in str(portion.inputs[0])
    shares = [float(part.share) for part in corpus.parts.values()]
    assert tokens == pytest.approx([100_000 * share / sum(shares) for share in shares], abs=1)
