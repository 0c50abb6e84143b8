"""All sets of a run must use one tokenizer, and a config can leave out the sets of its base."""

import shutil

import pytest

import pretrain
from scripts.evaluation.local_text import write_tasks
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from training.config import InvalidConfigError, load_config
from training.errors import InputError

FOX = "The quick brown fox number {i} jumps over the lazy dog.\n\n"
MATRIX = "A spectral norm is the largest singular value of a matrix; {i} is a number.\n\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    """Sets prepared with two different tokenizers, in the folders `own` and `other`."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, line in (("own", FOX), ("other", MATRIX)):
        (folder / name).mkdir()
        prepare_text(folder / name, line, 400)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A folder with a config that uses sets of one tokenizer, and with sets of another tokenizer in
    `other`."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    tiny_config(str(tmp_path))
    text = (tmp_path / "config.yaml").read_text()
    text = text.replace(f"{tmp_path}/tokens", f"{tmp_path}/own/d/tokens.train")
    (tmp_path / "config.yaml").write_text(text.replace("vocab_size: 120", "vocab_size: null"))
    return tmp_path


def train(folder, *overrides: str) -> int:
    """Run pretrain.py on the folder's config in this process and return its exit code."""
    arguments = ["--config", f"{folder}/config.yaml", "train.exit_step=2", *overrides]
    return pretrain.main([*arguments, "checkpoint.interval=1"])


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_sets_of_two_tokenizers_are_refused_at_a_start_and_on_resume(kind, folder, capsys, refusal):
    other = f"data.{kind}.mine.path={folder}/other/d/tokens.train"
    said = refusal(train(folder, other))
    assert (
        "all token sets must use the same tokenizer, got 2 tokenizers" in said
        and not (folder / "run").exists()
    )
    for name in ("walk", "mine", f"{folder}/own/d/tokenizer.json", f"{folder}/other/d/tokeniz"):
        assert name in said
    assert train(folder) == 0
    capsys.readouterr()
    assert train(folder, other, "train.exit_step=3", "checkpoint.allow_change=[data]") == 2
    assert "all token sets must use the same tokenizer, got 2 tokenizers" in capsys.readouterr().err


def test_a_tokenizer_that_the_config_names_must_be_that_of_the_sets(folder, refusal):
    said = refusal(train(folder, f"data.tokenizer={folder}/other/d"))
    assert "data.tokenizer" in said and f"{folder}/own/d/tokenizer.json" in said
    assert train(folder, f"data.tokenizer={folder}/own/d/tokenizer.json") == 0


def test_the_local_task_refuses_sets_of_two_tokenizers(folder):
    config, own, other = (folder / name for name in ("config.yaml", "own/d", "other/d"))
    mixed = load_config(config, [f"data.validation.mine.path={other}/tokens.train"])
    with pytest.raises(InputError, match=f"walk from {own}.*mine from {other}"):
        write_tasks(folder, mixed, own / "tokenizer.json", {})


def test_replace_leaves_out_the_sets_of_the_base(folder):
    mine = folder / "mine.yaml"
    text = "base: config.yaml\ndata:\n  replace: true\n  train:\n    mine: {path: mine/tokens}\n"
    text += "  validation:\n    mine: {path: mine/tokens}\n"
    mine.write_text(text)
    config = load_config(mine)
    assert list(config.data.train) == ["mine"] and list(config.data.validation) == ["mine"]
    assert config.run.name == "test"
    # A base with `replace` replaces the levels below it, not the levels above.
    (folder / "more.yaml").write_text("base: mine.yaml\ndata: {train: {more: {path: mine/more}}}\n")
    assert list(load_config(folder / "more.yaml").data.train) == ["mine", "more"]
    keys = ["data.replace=true", "data.train.last.path=x", "data.validation.last.path=x"]
    assert list(load_config(folder / "more.yaml", keys).data.train) == ["last"]
    mine.write_text(text.replace("true", "yes please"))
    with pytest.raises(InvalidConfigError, match=r"data.replace must be true, got 'yes please'"):
        load_config(mine)
