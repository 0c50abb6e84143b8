"""Run configs: what binds, what is refused, and with which message."""

import dataclasses
import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import families
from models.config import ModelConfig
from models.section import Section
from models.size import all_units
from spectral.rules import RULES
from tests.minimal_config import MINIMAL, problems
from training.assignments import assignments
from training.config import InvalidConfigError, check, load_config, to_yaml
from training.config.binding import bind
from training.config.checks import roles_of
from training.config.files import places_of
from training.config.sections.optimizer import RoleSettings


def test_a_minimal_config_gets_the_documented_defaults(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.seed == 1234
    assert config.optimizer.matrix.lr == 0.005, "YAML 1.1 would read 5e-3 as a string"
    assert config.model == ModelConfig(layers=4, hidden=64, heads=4, ffn=96)
    for name, rule in RULES.items():
        assert config.optimizer.rule(name) == rule()
    assert config.data.validation == {}
    assert not config.parallel.sequence_parallel


def test_a_config_cannot_be_changed(minimal: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(minimal).train.steps = 5  # type: ignore[misc]


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
    assert config.parallel.sequence is False
    assert list(config.data.train) == ["text", "more"]
    assert config.data.train["more"].weight == 3.0
    assert config.run.name == "with space"
    assert config.optimizer.rule("muon").steps == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.stesp=4", "unknown key train.stesp; did you mean train.steps?"),
        ("train.lr=3", "unknown key train.lr; did you mean optimizer.matrix.lr?"),
        ("optimizer.weight_decay=0", "unknown key optimizer.weight_decay; did you mean optimizer."),
        (
            "data.train.text.wieght=1",
            "unknown key data.train.text.wieght; did you mean data.train.",
        ),
        ("optimizer.rules.muon.momentun=1", "did you mean optimizer.rules.muon.momentum?"),
        ("log.zzz=1", "unknown key log.zzz; log has the keys interval"),
        ("base=other.yaml", "unknown key base; the config has the keys run, seed,"),
        ("train.steps='10'", "train.steps must be an integer, got '10'"),
        ("train.steps=10.0", "train.steps must be an integer, got 10.0"),
        ("train.steps=true", "train.steps must be an integer, got true"),
        ("train.steps=null", "train.steps must be an integer, got null"),
        ("train.exit_step=soon", "train.exit_step must be an integer or null, got 'soon'"),
        ("optimizer.matrix.lr=fast", "optimizer.matrix.lr must be a number, got 'fast'"),
        ("optimizer.matrix.lr=false", "optimizer.matrix.lr must be a number, got false"),
        ("optimizer.matrix.lr=.nan", "optimizer.matrix.lr must be a number, got nan"),
        ("run.name=3", "run.name must be a string, got 3"),
        ("model.init.spectral=1", "model.init.spectral must be true or false, got 1"),
        ("train=5", "train must be a section, got 5"),
        ("data.train=[a]", "data.train must be a section, got ['a']"),
        ("optimizer.qkv_units=heads", "one of head, group, component, fused, got 'heads'; did you"),
        ("optimizer.rules.muon.momentum=1.5", "optimizer.rules.muon.momentum must be in [0, 1)"),
        ("optimizer.matrix.rule=muno", "optimizer.matrix.rule must be one of adamw,"),
        ("model.family=lama", "model.family must be one of llama, qwen3"),
        ("model.kv_heads=3", "model.kv_heads must divide heads = 4, got 3"),
        ("model.heads=5", "model.heads must divide hidden = 64, got 5 (or set head_dim)"),
        ("model.head_dim=15", "model.head_dim must be even for rotary positions, got 15"),
        ("model.layers=0", "model.layers must be at least 1, got 0"),
        ("data.train.text.weight=0", "data.train.text.weight must be above 0, got 0"),
        ("data.validation={a/b: {path: x}}", "data.validation has a set 'a/b'; names are letters"),
        ("train.exit_step=101", "train.exit_step must be at most steps = 100, got 101"),
        ("schedule.warmup_steps=100", "schedule.warmup_steps must be below train.steps = 100"),
        ("schedule.min_ratio=1.5", "schedule.min_ratio must be at most 1, got 1.5"),
        ("checkpoint.interval=-1", "checkpoint.interval must be at least 0, got -1"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last must be at least 1, got 0"),
        ("checkpoint.allow_change=[layout]", "checkpoint.allow_change[0] must be one of data,"),
        ("spikes.window=1", "spikes.window must be at least 2, got 1"),
        ("watchdog.hang_seconds=0", "watchdog.hang_seconds must be above 0, got 0"),
        ("log.interval=0", "log.interval must be at least 1, got 0"),
        ("seed=-1", "seed must be at least 0, got -1"),
        ("optimizer.clip.max_norm=0", "optimizer.clip.max_norm must be above 0, got 0"),
        (
            "optimizer.head.weight_decay=1000",
            "optimizer.head.weight_decay times lr must be below 1",
        ),
        ("optimizer.roles.qkv.lr=1", "optimizer.roles must name one of embedding, q, k, v, o, "),
        ("optimizer.roles.gat.lr=1", "got 'gat'; did you mean gate?"),
        ("optimizer.scalar.rule=muon", "optimizer.scalar.rule must be an elementwise rule"),
        ("seed", "an override must be key=value, got 'seed'"),
        ("train.=1", "an override must be key=value, got 'train.=1'"),
        ("run.name=${run.nam}", "run.nam"),
    ],
)
def test_a_bad_value_is_named_with_its_place(minimal: Path, override: str, problem: str) -> None:
    assert any(problem in line for line in problems(minimal, override))


def test_all_problems_come_at_once(minimal: Path) -> None:
    found = problems(
        minimal, "train.stesp=4", "train.micro_batch=x", "model.ffn=0", "optimizer.head.lr=-1"
    )
    assert [line.split(" ")[0] for line in found if not line.startswith("unknown")] == [
        "model.ffn",
        "train.micro_batch",
        "optimizer.head.lr",
    ]
    assert len(found) == 4


def test_everything_required_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 1\n")
    found = problems(path)
    assert "model.layers is required (an integer)" in found
    assert "train.steps is required (an integer)" in found
    assert "optimizer.matrix.lr is required (a number)" in found
    assert "train.exit_step is required (an integer or null)" not in found


def test_check_repeats_the_checks_of_loading(minimal: Path) -> None:
    config = load_config(minimal)
    train = dataclasses.replace(config.train, steps=0)
    with pytest.raises(InvalidConfigError, match=r"train\.steps must be at least 1, got 0"):
        check(dataclasses.replace(config, train=train), 1)


def test_bases_are_merged_in_order_and_lists_replace(tmp_path: Path, minimal: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.yaml").write_text("base: ../minimal.yaml\nseed: 1\nlog: {interval: 3}")
    (tmp_path / "deep" / "b.yaml").write_text("seed: 2\nrun: {dir: 'runs/${run.name}'}")
    (tmp_path / "top.yaml").write_text("base: [deep/a.yaml, deep/b.yaml]\nrun: {name: top}")
    config = load_config(tmp_path / "top.yaml")
    assert (config.seed, config.log.interval, config.run.dir) == (2, 3, "runs/top")
    assert load_config(tmp_path / "top.yaml", ["run.name=x"]).run.dir == "runs/x"


def test_unreadable_files_are_named(
    tmp_path: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "a.yaml": "base: b.yaml",
        "b.yaml": "base: a.yaml",
        "lost.yaml": "base: nowhere.yaml",
        "syntax.yaml": "run: {name: x",
        "twice.yaml": "seed: 1\nseed: 2",
        "list.yaml": "- 1",
        "scalar.yaml": "3",
        "number.yaml": "base: 3",
    }.items():
        Path(name).write_text(text)
    (expected,) = problems(Path("a.yaml"))
    assert expected == "base files form a cycle: a.yaml -> b.yaml -> a.yaml"
    (expected,) = problems(Path("lost.yaml"))
    assert expected == (
        "cannot read config nowhere.yaml, the base of lost.yaml: No such file or directory"
    )
    assert problems(Path("absent.yaml"))[0].startswith("cannot read config absent.yaml: No such")
    assert problems(Path("syntax.yaml"))[0].startswith("syntax.yaml is not valid YAML: ")
    assert "duplicate key seed" in problems(Path("twice.yaml"))[0]
    assert problems(Path("list.yaml"))[0].startswith("list.yaml must hold a mapping of sections")
    assert problems(Path("scalar.yaml"))[0].startswith(
        "scalar.yaml must hold a mapping of sections"
    )
    assert "must be a file or a list of files, got 3" in problems(Path("number.yaml"))[0]
    assert problems(tmp_path) == ["config . must be a file"]


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
    assert settings("gate") == RoleSettings("spectral_sphere", 5e-3, 0.1)
    assert settings("down") == RoleSettings("spectral_sphere", 1e-3, 0.1)
    assert settings("o") == RoleSettings("adamw", 5e-3, 0.0)
    assert settings("head") == RoleSettings("adamw", 7.0, 0.0)
    assert settings("embedding") == settings("gain") == RoleSettings("adamw", 1e-3, 0.0)


def test_a_role_exists_only_under_the_units_that_make_it(minimal: Path) -> None:
    fused = ["optimizer.qkv_units=fused", "optimizer.split_gate_up=false"]
    load_config(minimal, [*fused, "optimizer.roles.qkv.lr=1e-3", "optimizer.roles.gate_up.lr=1e-3"])
    assert problems(minimal, *fused, "optimizer.roles.q.lr=1e-3")


@pytest.mark.parametrize(
    ("qkv_units", "split"), list(product(("head", "group", "component", "fused"), (True, False)))
)
def test_roles_and_families_are_those_of_the_models(qkv_units: str, split: bool) -> None:
    for name in ("llama", "qwen3", "deepnet", "gpt"):
        for activation in ("swiglu", "relu2") if name == "gpt" else ("swiglu",):
            shape = ModelConfig(
                family=name, layers=1, hidden=64, heads=4, kv_heads=2, ffn=96, vocab_size=128,
                activation=activation, qk_norm=name != "llama",
            )  # fmt: skip
            units = families.FAMILIES[name].units(
                shape, layers=[0], qkv_units=qkv_units, split_gate_up=split
            )
            roles = roles_of(shape, qkv_units, split)
            assert {unit.role for unit in units} == set(roles)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.qk_norm=true", "model.qk_norm must be false for family llama, got true"),
        ("model.activation=relu2", "model.activation must be swiglu for family llama, got relu2"),
        ("model.family=qwen3", "model.qk_norm must be true for family qwen3, got false"),
        ("model.family=deepnet", "model.qk_norm must be true for family deepnet, got false"),
        ("model.sliding_window=4", "model.sliding_window must be null for family llama, got 4"),
        ("model.final_softcap=9", "model.final_softcap must be null for family llama, got 9.0"),
        ("model.family=gemma2", "model.activation must be geglu for family gemma2, got swiglu"),
    ],
)
def test_a_family_refuses_what_it_is_not_made_of(
    minimal: Path, override: str, problem: str
) -> None:
    assert problems(minimal, override) == [problem]


def test_gpt_is_what_the_config_says(minimal: Path) -> None:
    load_config(minimal, ["model.family=gpt", "model.activation=relu2", "model.qk_norm=true"])


FLOATS = st.floats(min_value=1e-9, max_value=0.5)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="$\\"), min_size=1, max_size=12)


@given(lr=FLOATS, epsilon=FLOATS, steps=st.integers(101, 10**9), name=NAMES, folder=NAMES)
def test_the_written_config_loads_to_an_equal_one(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    epsilon: float,
    steps: int,
    name: str,
    folder: str,
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(MINIMAL)
    base = load_config(path)
    config = dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, name=name, dir=folder),
        train=dataclasses.replace(base.train, steps=steps),
        model=dataclasses.replace(base.model, norm_epsilon=epsilon),
        optimizer=dataclasses.replace(
            base.optimizer, matrix=dataclasses.replace(base.optimizer.matrix, lr=lr)
        ),
    )
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


@dataclass(frozen=True)
class Part:
    size: int = 1
    kind: Literal["a", 1] = "a"


@dataclass(frozen=True)
class Whole(Section):
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    listed: list[Part] = field(default_factory=list)
    maybe: Part | None = None
    either: int | str = 0
    named: dict[str, Part] = field(default_factory=dict)


def bound(mapping: dict[str, object]) -> tuple[Whole | None, list[str]]:
    try:
        return bind(Whole, mapping), []
    except InvalidConfigError as error:
        return None, error.problems


def test_binding_of_every_kind_of_field() -> None:
    mapping: dict[str, object] = {
        "pair": [3, 4],
        "many": ["x", "y"],
        "listed": [{"size": 2}, {}],
        "maybe": {"kind": 1},
        "either": "word",
        "named": {"first": {"size": 5}},
    }
    assert bound(mapping) == (
        Whole((3, 4.0), ("x", "y"), [Part(2), Part()], Part(kind=1), "word", {"first": Part(5)}),
        [],
    )
    assert bound({"maybe": None}) == (Whole(), [])


def test_binding_names_the_place_inside_lists_and_options() -> None:
    mapping: dict[str, object] = {
        "pair": [3, 4, 5],
        "many": ["x", 1],
        "listed": [{"size": 2}, {"size": "2"}],
        "maybe": {"kind": "b"},
        "either": 1.5,
        "named": {"first": {"sizes": 5}},
    }
    assert bound(mapping) == (
        None,
        [
            "pair must be a list of 2: an integer, a number, got [3, 4, 5]",
            "many[1] must be a string, got 1",
            "listed[1].size must be an integer, got '2'",
            "maybe.kind must be one of a, 1, got 'b'",
            "either must be an integer or a string, got 1.5",
            "unknown key named.first.sizes; did you mean named.first.size?",
        ],
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pc.blocks=[o,gaet]", "pc.blocks must name one of"),
        ("pc.blocks=[embedding]", "pc.blocks must name one of"),
        ("pc.level=5", "pc.level must be one of 0, 1, 2, 3, 4 or null, got 5"),
        ("pc.steps=0", "pc.steps must be at least 1, got 0"),
        ("pc.level=true", "pc.level must be one of 0, 1, 2, 3, 4 or null, got true"),
        ("pc.overrides.late={layers: [3, 9], level: 1}", "must end below model.layers = 4, got 9"),
        ("pc.overrides.late={roles: [router], level: 1}", "pc.overrides.late.roles must name"),
        (
            "pc.overrides.late={roles: [q], level: 1}",
            "pc.overrides.late.roles must name PC layers, one of o, gate, up, down, got 'q'",
        ),
        ("pc.polynomial={kind: fitted, cutoff: 1.2}", "cutoff must be below upper = 1.1, got 1.2"),
    ],
)
def test_wrong_pc_sections_are_refused(root: Path, override: str, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(words)):
        load_config(root / "configs" / "tiny_sso.yaml", [override])


def test_dynamic_retraction_is_refused_beside_weight_decay(root: Path) -> None:
    dynamic = "optimizer.rules.spectral_sphere.retraction=dynamic"
    path = root / "configs" / "tiny_sso.yaml"
    load_config(path, [dynamic])
    for place in ("matrix", "roles.down"):
        decay = f"optimizer.{place}.weight_decay=0.1"
        load_config(path, [decay])
        words = f"optimizer.{place}.weight_decay must be 0 with retraction dynamic, as"
        with pytest.raises(InvalidConfigError, match=f"^{re.escape(words)}.*got 0.1$"):
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
def test_an_empty_pc_section_is_the_papers_choice(
    root: Path, name: str, level: int, decay: float
) -> None:
    """Level 4 under AdamW and 2 under Muon; gamma decays like every other vector."""
    config = load_config(root / "configs" / f"{name}.yaml", ["pc={}"])
    assert config.pc is not None and config.pc.level == level
    model = dataclasses.replace(config.model, vocab_size=128)
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
def test_an_empty_gram_penalty_section_is_the_papers_choice(
    root: Path, name: str, coefficient: float
) -> None:
    config = load_config(root / "configs" / f"{name}.yaml", ["gram_penalty={}"])
    assert config.gram_penalty is not None
    assert config.gram_penalty.coefficient == coefficient
    given = load_config(root / "configs" / f"{name}.yaml", ["gram_penalty.coefficient=0.5"])
    assert given.gram_penalty is not None and given.gram_penalty.coefficient == 0.5


# --- sets of a base -----------------------------------------------------------------------------


@pytest.fixture
def overlay(minimal: Path, tmp_path: Path) -> Path:
    """A config with a set beside that of its base."""
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
def test_null_leaves_out_sets_of_a_base(
    overlay: Path, overrides: list[str], names: list[str]
) -> None:
    assert set(load_config(overlay, overrides).data.train) == set(names)


def test_null_in_a_file_leaves_out_sets_of_its_base(overlay: Path) -> None:
    text = overlay.read_text()
    overlay.write_text(text + "    text: null\n")
    assert list(load_config(overlay).data.train) == ["mine"]
    overlay.write_text(text.partition("data:")[0] + "data: {train: null, mock: true}\n")
    assert load_config(overlay).data.train == {}


def test_null_for_a_set_that_nobody_named_is_refused(overlay: Path) -> None:
    assert problems(overlay, "data.train.txt=null") == [
        "data.train.txt is null, which leaves out what a base has under that name, but none has it"
    ]
    assert problems(overlay, "optimizer.roles.gate=null", "pc.overrides.o=null") == [
        f"{key} is null, which leaves out what a base has under that name, but none has it"
        for key in ("optimizer.roles.gate", "pc.overrides.o")
    ]
    assert problems(overlay, "data.train=null") == [
        "data.train must name at least one set, got none"
    ]


def test_places_of_a_key_are_found_in_the_order_of_their_strength(
    overlay: Path, minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ["data", "train", "text"]
    base = f"{minimal.relative_to(tmp_path)}, line 4"
    assert list(places_of(overlay, ["seed=3"], text)) == [base]
    assert list(places_of(overlay, ["data.train.text.path=x"], text)) == [
        "the override data.train.text.path=x",
        base,
    ]
    assert list(places_of(overlay, [], ["data", "train", "mine"])) == ["overlay.yaml, line 4"]
    assert list(places_of(overlay, ["data.train.mine=null"], text)) == [base]
    overlay.write_text(overlay.read_text() + "    text: {weight: 2}\n")
    assert list(places_of(overlay, [], text)) == ["overlay.yaml, line 5", base]
