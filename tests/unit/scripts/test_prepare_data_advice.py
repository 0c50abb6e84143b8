"""A preparation ends with a config on its sets and the command that trains on it."""

import re

from scripts.prepare_data import main
from tests.paths import ROOT
from training.config import load_config


def test_the_config_to_paste_is_one_on_the_prepared_sets_alone(tmp_path, capsys):
    lines = [f"Line {i * i} of this book is followed by {i**3} others.\n\n" for i in range(400)]
    (tmp_path / "book.md").write_text("# A book\n\n" + "".join(lines))
    output = tmp_path / "mine"
    options = ["--train-tokenizer", "300", "--validation-fraction", "0.1", "--document-bytes", "64"]
    assert main([f"book={tmp_path / 'book.md'}", *options, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    pasted = re.search(r"^base: .*?(?=\n\n)", said, re.MULTILINE | re.DOTALL)
    assert pasted is not None
    config = tmp_path / "mine.yaml"
    config.write_text(pasted[0].replace("base: ", f"base: {ROOT}/"))
    loaded = load_config(config)
    assert list(loaded.data.train) == list(loaded.data.validation) == ["book"]
    assert loaded.data.train["book"].path == f"{output}/book.train"
    assert loaded.run.name == "mine"
    assert said.endswith("and run: python pretrain.py --config mine.yaml --ranks 2\n")
