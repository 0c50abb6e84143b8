"""A study lists the keys in which its variants differ, except keys that the study tunes or sets."""

import re

import pytest
import yaml

from scripts.studies.description import read_study
from scripts.studies.differences import differences, sentences
from scripts.studies.records import Record
from scripts.studies.running import check_candidates, run_study
from scripts.studies.tables import by_dataset, comparison
from scripts.studies.tables import records as records_of
from tests.paths import ROOT
from tests.token_files import write_token_set
from training.errors import InputError

ADAMW, SSO = "configs/tiny_adamw.yaml", "configs/tiny_sso.yaml"


def found_in(folder, variants, **keys):
    """Return the differences between the variants of a study, by variant."""
    path = folder / "study.yaml"
    content = {"title": "t", "seeds": [1], "variants": variants} | keys
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study = read_study(path)
    found = differences(study, {}, check_candidates(study, {}, []))
    assert len(sentences(study, found)) == len(found)
    return found


def searched(key: str):
    return {"rate": {"grid": {key: [0.1, 0.2, 0.3]}}}


def test_other_keys_than_those_that_are_tuned_are_named(tmp_path):
    """The initialisation of the recipes is listed, but neither the learning rate nor settings of a
    single rule are."""
    variants = {
        "AdamW": {"config": ADAMW, "search": searched("optimizer.matrix.lr")},
        "SSO": {"config": SSO, "against": "AdamW", "search": searched("optimizer.matrix.lr")},
    }
    search = {"seed": 1, "stages": {"rate": [{"share": 1.0, "keep": 1}]}}
    found = found_in(tmp_path, variants, search=search, full={"train.steps": 40})
    assert found == {
        "SSO": {
            "model.init.depth_scaled": (False, True),
            "model.init.spectral": (True, False),
            "optimizer.matrix.weight_decay": (0.0, 0.1),
        }
    }


def test_keys_that_the_study_sets_or_declares_are_meant(tmp_path):
    plain = {"config": ADAMW, "overrides": ["optimizer.matrix.weight_decay=0"]}
    sso = {"config": SSO, "against": "AdamW", "overrides": ["optimizer.matrix.lr=0.003"]}
    declared = {"differs": ["model.init"]}
    assert found_in(tmp_path, {"AdamW": plain, "SSO": sso | declared}) == {}
    one = {"differs": ["model.init.spectral"]}
    (left,) = found_in(tmp_path, {"AdamW": plain, "SSO": sso | one}).values()
    assert [*left] == ["model.init.depth_scaled"]


def test_settings_of_one_name_under_two_rules_are_named(tmp_path):
    """The recipes set two momenta. `differs` declares the difference, and an equal value removes
    it."""
    muon = {"config": "configs/tiny_muon.yaml"}
    sso = {"config": SSO, "against": "Muon", "differs": ["model.init", "optimizer.matrix"]}
    key = "optimizer.rules.spectral_sphere.momentum"
    found = found_in(tmp_path, {"Muon": muon, "SSO": sso})
    assert found["SSO"] == {key: (0.9, 0.95)}
    declared = {"differs": [*sso["differs"], "optimizer.rules.spectral_sphere"]}
    assert found_in(tmp_path, {"Muon": muon, "SSO": sso | declared}) == {}
    same = {"overrides": [f"{key}=0.95"]}
    assert found_in(tmp_path, {"Muon": muon, "SSO": sso | same}) == {}


def test_a_section_that_one_of_them_has_is_one_key(tmp_path):
    variants = {"plain": {"config": ADAMW}, "pc": {"config": "configs/tiny_adamw_pc.yaml"}}
    assert found_in(tmp_path, variants) == {"pc": {"pc": ("set", None)}}
    variants["pc"] = {"config": ADAMW, "against": "plain", "overrides": ["pc.level=2"]}
    assert found_in(tmp_path, variants) == {}


def test_data_and_batch_are_named_too(tmp_path):
    longer = tmp_path / "longer.yaml"
    data = {"train": {"jargon": {"weight": 0.5}}}
    train = {"global_batch": 64}
    longer.write_text(yaml.safe_dump({"base": str(ROOT / ADAMW), "data": data, "train": train}))
    variants = {"plain": {"config": ADAMW}, "other": {"config": str(longer), "against": "plain"}}
    found = found_in(tmp_path, variants)["other"]
    assert found == {"data.train.jargon.weight": (0.5, 0.3), "train.global_batch": (64, 32)}


def test_a_declared_key_that_is_the_same_is_refused(tmp_path):
    variants = {"a": {"config": ADAMW}}
    variants["b"] = {"config": ADAMW, "against": "a", "differs": ["model.layers"]}
    refusal = "b.differs must not contain model.layers, because the value of model.layers is"
    with pytest.raises(InputError, match=refusal):
        found_in(tmp_path, variants)
    variants["b"] = {"config": SSO, "differs": ["model.init"]}
    with pytest.raises(InputError, match="b.differs requires against, got null"):
        found_in(tmp_path, variants)


def test_the_screen_and_the_table_say_so(tmp_path, capsys, monkeypatch):
    """Before the first run, the screen shows the number of candidates checked, the differences, and
    the grids that allow no verdict. The table also lists the differences."""
    monkeypatch.setattr("training.report.text.FIRST", 0.001)
    path = tmp_path / "study.yaml"
    grid = {"search": {"rate": {"grid": {"optimizer.matrix.lr": [0.01, 0.02]}}}}
    variants = {"AdamW": {"config": ADAMW}, "SSO": {"config": SSO, "against": "AdamW"}}
    variants = {name: variant | grid for name, variant in variants.items()}
    search = {"seed": 0, "stages": {"rate": [{"share": 1.0, "keep": 1}]}}
    study = {"title": "t", "seeds": [1], "variants": variants, "search": search}
    path.write_text(yaml.safe_dump(study | {"full": {"train.steps": 40}}))

    def records(runs) -> list[Record]:
        figures = {"loss": 1.0, "course": []}
        return [Record(run.key, run.label, [], False, 1.0, figures) for run in runs]

    def stopped(runs) -> list[Record]:
        raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        run_study(read_study(path), tmp_path, stopped, [])
    said = capsys.readouterr().err
    assert re.search("(?s)[0-4] of 4 candidates\n.*SSO and AdamW also differ in model.init", said)
    assert "model.init.depth_scaled (False, True), " in said
    assert (
        "the grid of SSO for optimizer.matrix.lr has only 2 values, so the best value is at" in said
    )
    run_study(read_study(path), tmp_path, records, [])
    table = (tmp_path / "table.md").read_text()
    assert "### also differ" in table and "| SSO | model.init.spectral | True | False |" in table


def test_losses_that_are_measured_differently_have_no_verdict(tmp_path, capsys):
    """Declaring the difference does not make the losses comparable. Weights of the mean do not
    matter for the loss of a single dataset, nor paths if the tokens are the same."""
    for name, seed in {"kjv": 1, "copy": 1, "other": 2}.items():
        write_token_set(tmp_path / name, tokens=100, vocab=60, seed=seed)
    path, key = tmp_path / "study.yaml", f"data.validation.kjv.path={tmp_path}"
    overrides = {
        "plain": [f"{key}/kjv"],
        "longer": [f"{key}/kjv", "train.sequence_length=64"],
        "mixed": [f"{key}/kjv", "data.train.kjv.weight=5"],
        "copied": [f"{key}/copy"],
        "other": [f"{key}/other"],
    }
    variants = {
        name: {"config": ADAMW, "overrides": texts, "against": "plain" if name != "plain" else None}
        for name, texts in overrides.items()
    }
    path.write_text(yaml.safe_dump({"title": "t", "seeds": [1, 2], "variants": variants}))

    def records(runs) -> list[Record]:
        figures = {"loss": 1.0, "course": [], "datasets": {"kjv": 1.0, "jargon": 1.0}}
        return [Record(run.key, run.label, [], False, 1.0, figures) for run in runs]

    content = run_study(read_study(path), tmp_path, records, [])
    no = "not comparable: the validation losses differ in "
    mean = f"{no}weights of the validation sets in the mean"
    expected = {
        "longer": f"{no}train.sequence_length", "mixed": mean, "copied": "level",
        "other": f"{no}data.validation.kjv.path",
    }  # fmt: skip
    verdicts = {line["variant"]: line["verdict"] for line in records_of(comparison(content))}
    assert {name: verdicts[name] for name in expected} == expected
    single = {line["variant"]: line["verdict"] for line in by_dataset(content)}
    assert {name: single[name] for name in expected} == expected | {"mixed": "level"}
    warning = "the validation losses of mixed and its reference are not comparable"
    assert warning in capsys.readouterr().err


def test_candidates_are_checked_after_the_first_ones_of_earlier_stages(tmp_path):
    levels = [["pc.level=2"], ["pc.level=3"]]
    stages = searched("optimizer.matrix.lr") | {"level": {"choices": levels}}
    rung = [{"share": 1.0, "keep": 1}]
    content = {
        "title": "t", "seeds": [1], "variants": {"a": {"config": ADAMW, "search": stages}},
        "search": {"seed": 0, "stages": dict.fromkeys(stages, rung)}, "full": {"train.steps": 40},
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    config = check_candidates(read_study(tmp_path / "study.yaml"), {}, [])["a"]
    assert (config.optimizer.matrix.lr, config.pc.level) == (0.1, 2)


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt", "tiny_moe"])
def test_recipes_that_are_compared_begin_alike(model, tmp_path):
    one, other = ({"config": f"configs/{model}_{rule}.yaml"} for rule in ("adamw", "muon"))
    found = found_in(tmp_path, {"one": one, "other": other | {"against": "one"}})
    assert not any(key.startswith(("model", "data", "train")) for key in found["other"])
