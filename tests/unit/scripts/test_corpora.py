"""Every recipe names the command that makes its data, and what that command makes is its data."""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from scripts.data.catalogue import read_corpora
from scripts.data.set_writer import token_dtype
from scripts.prepare_data import main, parse
from tests.paths import ROOT
from training.config import Config, load_config
from training.data.manifest import read_manifest

pytestmark = pytest.mark.slow

CORPORA = read_corpora()
RECIPES = sorted(
    path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("tiny_")
)
MADE_BY = re.compile(r"scripts/prepare_data\.py (.*) \((\d+) GB, (\d+) core hours\)")
TOKENS_PER_CORE_SECOND = 0.78e6
"""Measured with the embedded corpus and its tokenizer."""


def recipe(path: Path) -> Config:
    return load_config(path, [])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_recipe_makes_its_sets(path: Path) -> None:
    config = recipe(path)
    assert config.data.made_by is not None
    said = MADE_BY.fullmatch(config.data.made_by)
    assert said is not None
    options = parse(said[1].split())
    corpus = CORPORA[options.corpus]
    ((_, train),) = config.data.train.items()
    ((_, validation),) = config.data.validation.items()
    assert train.path == f"{options.output}/{corpus.name}.train"
    assert validation.path == f"{options.output}/{corpus.name}.validation"
    # No token is seen twice, and the held-out part is as long as the validation wants.
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer in a folder of its own."""
    folder = tmp_path_factory.mktemp("tokenizer") / "made"
    source = ROOT / "examples/data/jargon.txt.xz"
    arguments = [f"any={source}", "--train-tokenizer", "300", "--tokenizer-bytes", "100000"]
    assert main([*arguments, "--tokens", "1000", "--output", str(folder), "--workers", "1"]) == 0
    return folder / "tokenizer.json"


def test_parts_give_their_shares(tokenizer: Path, tmp_path: Path) -> None:
    """Each part is read from its own folder, up to its share and the rest of a document."""
    corpus = CORPORA["olmo_mix"]
    shares = [part.share for part in corpus.parts.values()]
    assert shares == sorted(shares, reverse=True)
    for number, part in enumerate(corpus.parts):
        folder = tmp_path / "local" / part
        folder.mkdir(parents=True)
        # Every byte of a letter that no pair joins is a token, and the end of a document another.
        lines = [f'{{"text": "{chr(ord("A") + number) * 9}"}}\n'] * 10_000
        (folder / "part.jsonl").write_text("".join(lines))
    plan = corpus.set_plan(100_000, tmp_path / "local")
    assert sum(portion.tokens or 0 for portion in plan.train) == pytest.approx(100_000, abs=7)
    arguments = ["--corpus", "olmo_mix", "--from", str(tmp_path / "local"), "--tokens", "100000"]
    output = tmp_path / "made"
    arguments += ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", "1"]
    assert main(arguments) == 0
    sets = read_manifest(output).sets
    train, held_out = sets["olmo_mix.train"], sets["olmo_mix.validation"]
    total = train.tokens + held_out.tokens
    assert 100_000 <= total <= 100_000 + 7 * 10
    assert Fraction(held_out.documents, train.documents + held_out.documents) == pytest.approx(
        1 / 101, rel=0.02
    )
