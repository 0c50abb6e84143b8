"""docs/studies.md: its example is a study whose runs are configs, its command is understood."""

import re

from scripts.studies.schema import read_study
from scripts.studies.search import run_of
from scripts.study import parse
from tests.paths import ROOT
from training.config import load_config

PAGE = (ROOT / "docs" / "studies.md").read_text()


def test_the_example_is_a_study_of_valid_runs(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "study.yaml"
    path.write_text(example)
    study = read_study(path)
    assert {study.budget(name) for name in study.variants} == {4 * 0.25 + 2 * 0.5 + 2 * 0.5}
    for name, variant in study.variants.items():
        for stage in variant.search.values():
            for candidate in stage.candidates([]):
                run = run_of(study, name, candidate, 1, share=0.25)
                config = load_config(ROOT / run.config, [*run.overrides, "model.vocab_size=4096"])
                assert config.train.steps == 50


def test_the_command_is_understood():
    (command,) = re.findall(r"^    python scripts/study.py (.*)$", PAGE, re.MULTILINE)
    assert (ROOT / parse(command.split()).study).is_file()
