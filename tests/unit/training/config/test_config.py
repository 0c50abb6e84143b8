"""Run configs: accepted values, rejected values and messages."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from models.families import all_units, model_size
from spectral.rules import RULES
from tests.minimal_config import MINIMAL, problems
from training.assignments import assignments, config_routes
from training.config import InvalidConfigError, load_config, to_yaml
from training.config.optimizer_section import GroupConfig
from training.config.yaml_files import replaced
from training.local_path import local_path
from training.report.console import opening


def test_a_minimal_config_gets_the_documented_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.seed == 1234
    assert config.optimizer.matrix.lr == 0.005, "YAML 1.1 would read 5e-3 as a string"
    assert config.model == ModelConfig(layers=4, hidden=64, heads=4, ffn=96)
    for name, rule in RULES.items():
        assert config.optimizer.rule(name) == rule()
    assert config.data.validation == {} and not config.parallel.sequence_parallel


def test_overrides_win_and_are_read_as_yaml(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "train.steps=7",
            "optimizer.matrix.lr=2e-4",
            "train.exit_step=null",
            "parallel.tensor=2",
            "parallel.sequence=false",
            "data.train.more={path: data/more, weight: 3}",
            "run.name=with space",
            "optimizer.rules.muon.steps=5",
        ],
    )
    assert (config.train.steps, config.optimizer.matrix.lr, config.train.exit_step) == (
        7,
        2e-4,
        None,
    )
    assert config.parallel.sequence is False and list(config.data.train) == ["text", "more"]
    assert config.data.train["more"].weight == 3.0 and config.run.name == "with space"
    assert config.optimizer.rule("muon").steps == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.stesp=4", "unknown key train.stesp; did you mean train.steps?"),
        ("train.lr=3", "unknown key train.lr; did you mean optimizer.matrix.lr?"),
        ("data.train.text.wieght=1", "unknown key data.train.text.wieght; did you mean data.train"),
        ("optimizer.rules.muon.momentun=1", "did you mean optimizer.rules.muon.momentum?"),
        ("log.zzz=1", "unknown key log.zzz; log has the keys interval"),
        ("base=other.yaml", "unknown key base; the config has the keys run, seed,"),
        ("train.steps='10'", "train.steps must be an integer, got '10'"),
        ("train.steps=true", "train.steps must be an integer, got true"),
        ("optimizer.matrix.lr=.nan", "optimizer.matrix.lr must be a number, got nan"),
        ("run.name=3", "run.name must be a string, got 3"),
        ("model.init.spectral=1", "model.init.spectral must be true or false, got 1"),
        ("data.train=[a]", "data.train must be a section, got ['a']"),
        ("optimizer.qkv_units=heads", "one of head, group, component, fused, got 'heads'; did you"),
        ("optimizer.rules.muon.momentum=1.5", "optimizer.rules.muon.momentum must be in [0, 1)"),
        ("optimizer.matrix.rule=muno", "optimizer.matrix.rule must be one of adamw,"),
        ("optimizer.matrix.rule=sso", "got 'sso'; did you mean spectral_sphere?"),
        ("optimizer.matrix.rule=muon++", "got 'muon++'; did you mean muon_plus_plus?"),
        ("optimizer.matrix.rule=mine", "; to use your own rule, install its package"),
        ("optimizer.rules.mine.a=1", "; to use your own rule, install its package"),
        ("model.family=lama", "model.family must be one of llama, qwen3"),
        ("model.qk_norm=true", "model.qk_norm must be false for family llama, got true"),
        ("model.sliding_window=4", "model.sliding_window must be null for family llama, got 4"),
        ("model.kv_heads=3", "model.kv_heads must divide heads = 4, got 3"),
        ("model.heads=5", "model.heads must divide hidden = 64, got 5 (or set head_dim)"),
        ("model.head_dim=15", "model.head_dim must be even for rotary positions, got 15"),
        ("data.train.text.weight=0", "data.train.text.weight must be above 0, got 0"),
        ("data.validation={a/b: {path: x}}", "data.validation must use only letters"),
        ("train.exit_step=101", "train.exit_step must be at most steps = 100, got 101"),
        ("schedule.warmup_steps=100", "schedule.warmup_steps must be below train.steps = 100"),
        ("checkpoint.allow_change=[layout]", "checkpoint.allow_change[0] must be one of data,"),
        ("seed=-1", "seed must be at least 0, got -1"),
        ("optimizer.head.weight_decay=1000", "optimizer.head.weight_decay times lr must be below"),
        ("optimizer.roles.gat.lr=1", "got 'gat'; did you mean gate?"),
        ("optimizer.roles.q.radius_scaler=0", "optimizer.roles.q.radius_scaler must be above 0"),
        (
            "optimizer.roles.q={rule: muon, radius_scaler: 2}",
            "optimizer.roles.q.radius_scaler must be null with rule muon, got 2",
        ),
        ("optimizer.scalar.rule=muon", "optimizer.scalar.rule must be an elementwise rule"),
        (
            "model.rope_scaling={kind: longrope, factor: 4.0}",
            "model.rope_scaling.kind must be one of linear, llama3, yarn, got 'longrope'",
        ),
        (
            "model.rope_scaling={kind: llama3, factor: 8.0, original_max_position_embeddings: 64}",
            "model.rope_scaling.low_freq_factor must be a number with kind llama3, got null",
        ),
        (
            "model.rope_scaling={kind: yarn, factor: 8.0}",
            "model.rope_scaling.original_max_position_embeddings must be a number with kind yarn",
        ),
        (
            "model.rope_scaling={kind: linear, factor: 2.0, low_freq_factor: 1.0}",
            "model.rope_scaling.low_freq_factor must be null with kind linear, got 1.0",
        ),
        ("model.rope_scaling={kind: linear, factor: 0.5}", "factor must be at least 1, got 0.5"),
        (
            "model={layers: 4, attention_backend: transformer_engine, attention_bias: all}",
            "model.attention_bias must be none or qkv with transformer_engine, got 'all'",
        ),
        ("optimizer.roles.bias.rule=muon", "optimizer.roles.bias.rule must be an elementwise rule"),
        ("train.=1", "an override must be key=value, got 'train.=1'"),
        ("run.name=${run.nam}", "run.nam"),
        ("pc.blocks=[embedding]", "pc.blocks must name one of"),
        ("pc.overrides.late={layers: [3, 9], level: 1}", "must end below model.layers = 4, got 9"),
        ("pc.overrides.late={roles: [q], level: 1}", "pc.overrides.late.roles must name one of"),
        ("pc.evaluator={x: {y: 1}}", "pc.evaluator must be one of materialized, in_graph, got"),
        ("pc.polynomial={kind: fitted, cutoff: 1.2}", "cutoff must be below upper = 1.1, got 1.2"),
    ],
)
def test_a_bad_value_is_named_with_its_place(minimal: Path, override: str, problem: str) -> None:
    assert any(problem in line for line in problems(minimal, override))


def test_all_problems_come_at_once(minimal: Path) -> None:
    keys = ["train.stesp=4", "train.micro_batch=x", "model.ffn=0", "optimizer.head.lr=-1"]
    found = [line.split(" ")[0] for line in problems(minimal, *keys)]
    found.remove("unknown")
    assert found == ["model.ffn", "train.micro_batch", "optimizer.head.lr"]


def test_what_sections_cannot_be_together_comes_with_wrong_types(minimal: Path) -> None:
    """Sections with valid types are checked individually and against each other."""
    found = problems(
        minimal,
        "optimizer.head.lr=-1",
        "model.family=qwen3",
        "model.kv_heads=3",
        "schedule.warmup_steps=100",
        "optimizer.distributed.cuda_graph=true",
        "parallel.pipeline=3",
    )
    assert [line.split(" ")[0] for line in found] == [
        "optimizer.head.lr",
        "model.kv_heads",
        "optimizer.distributed.overlap_gather",
        "model.qk_norm",
        "schedule.warmup_steps",
        "model.layers",
    ]
    found = problems(minimal, "data=null", "pc={overrides: {a: {level: 7}}, level: 9, steps: 0}")
    named = [line.split(" ")[0] for line in found]
    assert named == ["pc.level", "pc.overrides.a.level", "pc.steps", "data"]
    minimal.write_text("seed: 3")
    assert all(" is required (" in line for line in problems(minimal))
    minimal.write_text(MINIMAL)
    # The family is unknown, so its roles are not checked.
    found = problems(minimal, "model.family=lama", "optimizer.roles.gat.lr=1")
    assert [line.split(" ")[0] for line in found] == ["model.family"]


def test_bases_are_merged_in_order_and_lists_replace(tmp_path: Path, minimal: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.yaml").write_text("base: ../minimal.yaml\nseed: 1\nlog: {interval: 3}")
    (tmp_path / "deep" / "b.yaml").write_text("seed: 2\nrun: {dir: 'runs/${run.name}'}")
    (tmp_path / "top.yaml").write_text("base: [deep/a.yaml, deep/b.yaml]\nrun: {name: top}")
    config = load_config(tmp_path / "top.yaml")
    assert (config.seed, config.log.interval, config.run.dir) == (2, 3, "runs/top")
    assert load_config(tmp_path / "top.yaml", ["run.name=x"]).run.dir == "runs/x"
    # Bases of a linked file are next to the file; and a cycle may take any way.
    (tmp_path / "link.yaml").symlink_to(tmp_path / "deep" / "a.yaml")
    assert load_config(tmp_path / "link.yaml").seed == 1
    (tmp_path / "deep" / "b.yaml").write_text("base: ../deep/b.yaml")
    with pytest.raises(InvalidConfigError, match="base files form a cycle"):
        load_config(tmp_path / "deep" / "b.yaml")


def test_unreadable_files_are_named(tmp_path, minimal, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text, said in (
        ("a.yaml", "base: b.yaml", "base files form a cycle: a.yaml -> b.yaml -> a.yaml"),
        ("b.yaml", "base: a.yaml", "base files form a cycle"),
        ("lost.yaml", "base: nowhere.yaml", "cannot read config nowhere.yaml, the base of lost"),
        ("twice.yaml", "seed: 1\nseed: 2", "duplicate key seed"),
        ("number.yaml", "base: 3", "must be a path or a list of paths, got 3"),
    ):
        Path(name).write_text(text)
        Path("b.yaml").write_text("base: a.yaml")
        assert said in problems(Path(name))[0]
    said = "cannot read config absent.yaml: No such file or directory"
    assert problems(Path("absent.yaml")) == [said]
    assert problems(Path("tiwce.yaml"))[0].endswith(" directory; did you mean twice.yaml?")


def test_a_role_inherits_what_its_override_leaves_out(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "optimizer.matrix.weight_decay=0.1",
            "optimizer.roles.down.lr=1e-3",
            "optimizer.roles.o={rule: adamw, weight_decay: 0}",
            "optimizer.roles.head.lr=7",
        ],
    )
    settings = config.optimizer.settings_for
    assert settings("gate") == GroupConfig(rule="spectral_sphere", lr=5e-3, weight_decay=0.1)
    assert settings("down") == GroupConfig(rule="spectral_sphere", lr=1e-3, weight_decay=0.1)
    assert settings("o") == GroupConfig(rule="adamw", lr=5e-3, weight_decay=0.0)
    assert settings("head") == GroupConfig(rule="adamw", lr=7.0, weight_decay=0.0)
    for role in ("embedding", "gain"):
        assert settings(role) == GroupConfig(rule="adamw", lr=1e-3, weight_decay=0.0)


def test_a_role_exists_only_under_the_units_that_make_it(minimal: Path) -> None:
    fused = ["optimizer.qkv_units=fused", "optimizer.split_gate_up=false"]
    load_config(minimal, [*fused, "optimizer.roles.qkv.lr=1e-3", "optimizer.roles.gate_up.lr=1e-3"])
    assert problems(minimal, *fused, "optimizer.roles.q.lr=1e-3")


FLOATS = st.floats(min_value=1e-9, max_value=0.5)
PATHS = st.text(st.characters(codec="utf-8", exclude_characters="$\\"), min_size=1, max_size=12)
FOLDERS = PATHS.filter(lambda text: not local_path("dir", text)[1])  # "A:/" looks like a URL
LETTERS = st.characters(exclude_characters="$\\/", exclude_categories=["C", "Zl", "Zp"])
NAMES = st.text(LETTERS, min_size=1, max_size=12).filter(lambda s: s.strip() not in ("", ".", ".."))


@example(lr=0.5, epsilon=0.5, steps=101, name="1e5", folder="1_0")
@example(lr=0.5, epsilon=0.5, steps=101, name="09_30", folder="1_000.5e3")
@example(lr=0.5, epsilon=0.5, steps=101, name="1/2", folder="0")
@example(lr=0.5, epsilon=0.5, steps=101, name="2024-31-12", folder="0:30")
@settings(max_examples=10)
@given(lr=FLOATS, epsilon=FLOATS, steps=st.integers(101, 10**9), name=NAMES, folder=FOLDERS)
def test_a_written_config_loads_to_an_equal_one(tmp_path_factory, lr, epsilon, steps, name, folder):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(MINIMAL)
    base = load_config(path)
    run, train = replace(base.run, name=name, dir=folder), replace(base.train, steps=steps)
    model = replace(base.model, norm_epsilon=epsilon)
    optimizer = replace(base.optimizer, matrix=replace(base.optimizer.matrix, lr=lr))
    config = replace(base, run=run, train=train, model=model, optimizer=optimizer)
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_dynamic_retraction_is_refused_beside_weight_decay(root: Path) -> None:
    dynamic = "optimizer.rules.spectral_sphere.retraction=dynamic"
    path = root / "configs" / "tiny_sso.yaml"
    load_config(path, [dynamic])
    for place in ("matrix", "roles.down"):
        decay = f"optimizer.{place}.weight_decay=0.1"
        load_config(path, [decay])
        words = f"optimizer.{place}.weight_decay must be 0 with retraction dynamic, got 0.1:"
        with pytest.raises(InvalidConfigError, match=f"^{re.escape(words)}"):
            load_config(path, [dynamic, decay])


@pytest.mark.parametrize(
    ("name", "level", "decay"),
    [
        ("llama271m_adamw", 4, 0.1),
        ("llama1b_muon", 2, 0.1),
        ("llama1b_sso", 2, 0.0),
        ("tiny_adamw", 4, 0.0),
        ("tiny_muon", 2, 0.0),
    ],
)
def test_an_empty_pc_section_is_the_papers_choice(root, name, level, decay) -> None:
    """The level is 4 under AdamW and 2 under Muon. Gamma has the same weight decay as every other
    vector."""
    config = load_config(root / "configs" / f"{name}.yaml", ["pc={}"])
    assert config.pc is not None and config.pc.level == level
    model = replace(config.model, vocab_size=128)
    unit = next(unit for unit in all_units(model) if unit.role == "up")
    assigned = assignments(config.optimizer, [unit], config.pc)(unit).pc
    assert assigned is not None and assigned.gamma_weight_decay == decay
    if name != "llama1b_sso" and name.startswith("llama"):
        paper = load_config(root / "configs" / f"{name}_pc.yaml")
        assert assignments(paper.optimizer, [unit], paper.pc)(unit).pc == assigned
    other = load_config(root / "configs" / f"{name}.yaml", ["pc.level=1", "pc.steps=3"])
    assert other.pc is not None and other.pc.level == 1


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [("gpt160m_adamw", 1e-3), ("gpt405m_muon", 1e-4), ("gpt1.4b_muon", 1e-4)],
)
def test_an_empty_gram_penalty_section_is_the_papers_choice(root, name, coefficient) -> None:
    config = load_config(root / "configs" / f"{name}.yaml", ["gram_penalty={}"])
    assert config.gram_penalty is not None and config.gram_penalty.coefficient == coefficient
    given = load_config(root / "configs" / f"{name}.yaml", ["gram_penalty.coefficient=0.5"])
    assert given.gram_penalty is not None and given.gram_penalty.coefficient == 0.5


# --- sets of a base -----------------------------------------------------------------------------


@pytest.fixture
def overlay(minimal: Path, tmp_path: Path) -> Path:
    """The file of a config that adds a set to the sets of its base."""
    path = tmp_path / "overlay.yaml"
    path.write_text(f"base: {minimal}\ndata:\n  train:\n    mine: {{path: data/mine}}\n")
    return path


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["text", "mine"]),
        (["data.train.text=null"], ["mine"]),
        (["data.train=null", "data.train.other.path=x"], ["other"]),
        (["data.train.text=null", "data.train.text.path=x"], ["mine", "text"]),
    ],
)
def test_null_leaves_out_sets_of_a_base(overlay, overrides, names) -> None:
    assert set(load_config(overlay, overrides).data.train) == set(names)


def test_null_for_a_set_that_nobody_named_is_refused(overlay: Path) -> None:
    keys = [f"{key}=null" for key in ("pc.overrides.o", "optimizer.roles.gate", "data.train.txt")]
    said = "removes an entry of a base file, but no base file defines "
    said = [f"{key} {said}{key.removesuffix('=null')}" for key in keys]
    assert problems(overlay, *keys[:2]) == said[:2] and problems(overlay, keys[2]) == said[2:]
    said = "data.train must contain at least one set, got none"
    assert problems(overlay, "data.train=null") == [said]


def test_an_override_that_another_one_replaces_is_named() -> None:
    overrides = ["train.steps=5", "seed=1", "train={steps: 9}", "seed=1"]
    assert [*replaced(overrides)] == ["override train={steps: 9} replaces override train.steps=5"]


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["pc.level=4", "pc=null"], True),
        (["pc=null", "pc.level=4"], False),
        (["data.train.a=null", "data.train.a.path=x"], False),
        (["pc.level=4", "pc={replace: true, steps: 3}"], True),
        (["data.train.a.path=x", "data.train=null"], True),
        (["data.train=null", "data.train.a.path=x"], False),
        (["pc.level=4", "pc={steps: 3}"], False),
    ],
)
def test_overrides_of_a_section_are_replaced_by_overrides_of_the_whole(overrides, warned):
    first, last = overrides
    assert [*replaced(overrides)] == [f"override {last} replaces override {first}"] * warned


def test_the_opening_names_what_differs_from_the_usual(root: Path) -> None:
    recipe = root / "configs" / "tiny_moe_sso.yaml"
    mixture = load_config(recipe, ["optimizer.roles.router.lr=4e-3"])
    mixture = replace(mixture, model=replace(mixture.model, vocab_size=100))
    assert "; adamw at 0.004 for router" in "; ".join(opening(mixture, 1))
    without = replace(mixture, optimizer=replace(mixture.optimizer, roles={}))
    assert "; adamw at 0.02 for router" in "; ".join(opening(without, 1))
    early = replace(mixture, train=replace(mixture.train, exit_step=7))
    assert "in total; train.exit_step ends the run after step 7; " in "; ".join(opening(early, 1))
    split = replace(mixture, parallel=replace(mixture.parallel, tensor=2, context=2, expert=4))
    ranks = "on 8 ranks (data 2, tensor 2, context 2, expert 4); "
    assert ranks in next(iter(opening(split, 8)))
    for more, equal in (([], False), (["data.validation.more.path=x"], True)):
        config = load_config(recipe, ["model.vocab_size=100", *more])
        said = "val/loss weights all validation sets equally, because more is not a training set"
        assert (said in "; ".join(opening(config, 1))) is equal


def test_a_tied_head_is_stepped_as_the_embedding(minimal: Path) -> None:
    tied = ["model.tie_embeddings=true", "model.vocab_size=100", "optimizer.embedding.lr=2e-3"]
    config = load_config(minimal, tied)
    routes = {route.unit: route for route in config_routes(config) if route.role != "gain"}
    assert "head" not in routes and routes["embedding"].lr == 2e-3
    assert "at 0.002 for tied embedding and head; " in "; ".join(opening(config, 1))
    sizes = [model_size(replace(config.model, tie_embeddings=tie), 32) for tie in (True, False)]
    assert sizes[1].parameters - sizes[0].parameters == 128 * 64
    assert sizes[1].flops_per_token == sizes[0].flops_per_token
    with pytest.raises(InvalidConfigError, match=r"optimizer.roles must name .*, got 'head'"):
        load_config(minimal, [*tied, "optimizer.roles.head.lr=1"])
