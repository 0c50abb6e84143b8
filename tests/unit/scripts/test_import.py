"""scripts/convert_hf.py import: importing and exporting returns the same tensors, and training
continues from imported weights."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from models.huggingface.config_json import (
    READABLE,
    config_json,
    differences,
    model_section,
    model_settings,
)
from scripts.convert_hf import main
from tests.export_cases import DEEPSEEK, GEMMA2, MOE, QWEN3, SOFTMAX_MOE
from tests.run_configs import tiny_config
from tests.run_results import metrics_of, same_state, tensors_of
from tests.slow_cases import slow_but
from training.checkpoint.checkpoints import read_checkpoint
from training.config import load_config, to_yaml
from training.data.token_set import TokenSet
from training.run import train

MODELS = {
    "llama": {},
    "llama 3.2": {
        "model__tie_embeddings": True,
        "model__rope_base": 5e5,
        "model__rope_scaling__kind": "llama3",
        "model__rope_scaling__factor": 32.0,
        "model__rope_scaling__original_max_position_embeddings": 8,
        "model__rope_scaling__low_freq_factor": 1.0,
        "model__rope_scaling__high_freq_factor": 4.0,
    },
    "qwen2": {"model__attention_bias": "qkv", "model__norm_epsilon": 1e-6},
    "all biases": {
        "model__attention_bias": "all",
        "model__rope_scaling__kind": "yarn",
        "model__rope_scaling__factor": 4.0,
        "model__rope_scaling__original_max_position_embeddings": 8,
    },
    "qwen3": {**QWEN3, "optimizer__qkv_units": "fused", "optimizer__split_gate_up": False},
    "gemma2": GEMMA2,
    "deepseek": {**DEEPSEEK, "model__latent__query_rank": 20},
    "moe": MOE,
    "moe softmax": SOFTMAX_MOE,
}
GROUPS = ("matrix", "embedding", "head", "scalar")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(scope="module")
def tokens(shared_folder) -> Path:
    return shared_folder


def their_model(folder: Path, config: Path, **keys: object) -> dict[str, torch.Tensor]:
    """Write a model folder with transformers, with random tensors, and return the tensors. `keys`
    sets the dtype and the shards, and `config` is the run config of the import."""
    dtype = getattr(torch, str(keys.get("dtype", "float32")))
    model = load_config(config).model
    settings = config_json(model, dtype="float32", positions=32, end_token=0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, value in (*theirs.named_parameters(), *theirs.named_buffers()):
            if value.is_floating_point() and "inv_freq" not in name:
                value.normal_(std=0.1)
    theirs.to(dtype).save_pretrained(folder, max_shard_size=str(keys.get("shards", "5GB")))
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def config_in(tmp_path: Path, tokens: Path, **keys: object) -> Path:
    """Write the config of a tiny run on `tokens`, and return its path."""
    keys = {"validation__interval": 1, "train__steps": 4, "checkpoint__interval": 2, **keys}
    data = {f"data__{kind}__walk__path": f"{tokens}/tokens" for kind in ("train", "validation")}
    config = tiny_config(str(tmp_path), "spectral_sphere", **{**data, **keys})
    path = tmp_path / "import.yaml"
    path.write_text(to_yaml(config))
    return path


PLAIN = ("llama", "qwen3", "gemma2", "deepseek", "moe", "moe softmax")
"""Models in the fast tests. The other models are among the transformers models below."""
FAST = [*((name, "float32") for name in PLAIN), ("llama", "bfloat16"), ("deepseek", "bfloat16")]
"""Models and dtypes in the fast tests. The bias of DeepSeek's router stays in float32."""


@pytest.mark.usefixtures("no_memory_is_zero")
@pytest.mark.parametrize(
    ("name", "dtype"), slow_but(FAST, product(MODELS, ("float32", "bfloat16")))
)
def test_export_of_an_import_is_the_source(name, dtype, tokens, tmp_path, world, capsys) -> None:
    config = config_in(tmp_path, tokens, **MODELS[name])
    source = tmp_path / "theirs"
    theirs = their_model(source, config, dtype=dtype, shards="100KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    run, out = tmp_path / "imported", tmp_path / "out"
    assert main(["import", str(source), str(run), "--config", str(config)]) == 0
    assert "positions: " not in capsys.readouterr().out
    stored = tensors_of(read_checkpoint(run), "weight/")
    for key in ("weight/embedding", "weight/head"):  # 120 tokens, padded
        assert key not in stored or stored[key].shape[0] == 128 and not stored[key][120:].any()
    assert main(["export", str(run), str(out), "--no-tokenizer"]) == 0
    assert "differ by at most" in capsys.readouterr().out
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith("e_score_correction_bias"):
            value = value.float()
        kind = BITS[value.dtype]
        assert ours[key].dtype == value.dtype, key
        assert torch.equal(ours[key].view(kind), value.view(kind)), key
    if any(key.endswith("e_score_correction_bias") for key in ours):  # which stay float32
        again = ["import", str(out), str(tmp_path / "again"), "--config", str(config)]
        assert main([*again, "train.sequence_length=32", "train.sequence_length=64"]) == 0
        said, replaced = capsys.readouterr()
        assert "=64 replaces override train.sequence_length=32" in replaced
        assert f"{dtype} weights" in said
        assert "would set it to 64, because train.sequence_length is 64" in said
        assert same_state(stored, tensors_of(read_checkpoint(tmp_path / "again"), "weight/")) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value, tokens, tmp_path, world, capsys) -> None:
    path = config_in(tmp_path, tokens, model__vocab_multiple=8)
    source = tmp_path / "theirs"
    their_model(source, path)
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 3] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(source), str(tmp_path / "run"), "--config", str(path)]) == 2
    assert f"{name} must be finite, got NaN or infinity" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_training_begins_with_the_imported_weights(tokens, tmp_path, world, capsys) -> None:
    path = config_in(tmp_path, tokens, model__vocab_multiple=8)
    source, weights = tmp_path / "theirs", tmp_path / "imported"
    save_file(their_model(source, path), source / "consolidated.safetensors")
    settings = json.loads((source / "config.json").read_text())
    unusual = {"attention_dropout": 0.1, "auto_map": {"AutoModelForCausalLM": "m.M"}}
    (source / "config.json").write_text(json.dumps(settings | unusual))
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    options = ["--config", str(path), "model.vocab_size=null"]  # as in config.json
    assert main(["import", str(source), str(weights), *options]) == 0
    said = capsys.readouterr().out
    assert f"note: {source} has attention_dropout 0.1, but runs train without dropout" in said
    assert (
        "contains custom code, which is ignored (auto_map {'AutoModelForCausalLM': 'm.M'})" in said
    )
    assert f"note: {source} contains unread files: consolidated.safetensors" in said
    assert "generation_config.json has several end tokens, [0, 5], but exporting" in said
    # The updates are too small for any change, so the loss after a step equals the first.
    still = ["optimizer.matrix.rule=adamw", *(f"optimizer.{group}.lr=1e-30" for group in GROUPS)]
    config = load_config(path, [f"checkpoint.initialize_from={weights}", *still])
    train(config, world)
    theirs = AutoModelForCausalLM.from_pretrained(source)
    first = metrics_of(Path(config.run.dir))[0]["val/walk/loss"]
    assert first == pytest.approx(their_loss(theirs, tokens), abs=1e-4)


def their_loss(model: torch.nn.Module, tokens: Path) -> float:
    """Return the mean loss of the transformers model over the validation windows of the run."""
    data = TokenSet("walk", tokens / "tokens", 32)
    windows = torch.stack([torch.from_numpy(data.window(i)) for i in range(5)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return float(loss)


def refused(refusal, source: Path, run: Path, config: Path, *more: str) -> str:
    error = refusal(main(["import", str(source), str(run), "--config", str(config), *more]))
    [line] = [text for text in error.splitlines() if text.startswith("error: ")]
    assert "Traceback" not in error
    assert not run.exists() and not run.with_name(run.name + ".preparing").exists()
    return line


def test_what_does_not_fit_is_refused(tokens, tmp_path, refusal) -> None:
    config = config_in(tmp_path, tokens)
    source, run = tmp_path / "theirs", tmp_path / "imported"
    assert "no config.json" in refused(refusal, tmp_path / "nothing", run, config)
    tensors = their_model(source, config)
    settings = json.loads((source / "config.json").read_text())

    def changed(**values: object) -> str:
        (source / "config.json").write_text(json.dumps({**settings, **values}))
        line = refused(refusal, source, run, config)
        (source / "config.json").write_text(json.dumps(settings))
        return line

    assert "hidden_size must be 64 to match the config's model, got 128" in changed(hidden_size=128)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert "rope_theta must be 10000.0 to match" in changed(rope_parameters=rope, rope_theta=5e5)
    line = changed(rope_theta=5e5)
    assert "must be equal, got 500000.0 and 10000.0: transformers 4 reads the first key" in line
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    assert "Missing required keys" in changed(rope_parameters=rope)
    rope = {**rope, "rope_type": "dynamic"}
    assert "rope_type must be one of" in changed(rope_parameters=rope, rope_theta=5e5)
    assert "attention_bias must be False to match" in changed(attention_bias=True)
    assert "is_causal must be True to match" in changed(is_causal=False)
    assert "config.json: " in changed(model_type="no_such")
    weights = source / "model.safetensors"
    save_file({**tensors, "model.extra": torch.zeros(1)}, weights)
    said = "contains tensors that do not belong to the model in the config: model.extra"
    assert said in refused(refusal, source, run, config)
    missing = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    save_file(missing, weights)
    said = "is missing tensors of the model in the config: model.norm.weight"
    assert refused(refusal, source, run, config).endswith(said)
    save_file({f"_orig_mod.{name}": value for name, value in tensors.items()}, weights)
    said = f"; the files contain _orig_mod.lm_head.weight (and {len(tensors) - 1} others) instead"
    assert refused(refusal, source, run, config).endswith(said)
    others = len(tensors) - 2
    norm = tensors["model.norm.weight"]
    for value, wrong in (
        (norm[:63].clone(), "model.norm.weight must have shape (64,), got (63,)"),
        (norm.half(), "same dtype, one of F32, BF16, F16, got F16, F32"),
    ):
        save_file({**tensors, "model.norm.weight": value}, weights)
        assert wrong in refused(refusal, source, run, config)
    save_file({"model.norm.weight": norm}, weights)
    assert refused(refusal, source, run, config).endswith(f" (and {others} others)")
    save_file(missing, weights)
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refused(refusal, source, run, config)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert refused(refusal, source, run, config).endswith("not the file itself: run git lfs pull")
    other = ["model.family=gpt", "model.activation=relu2"]
    assert "model.activation must be swiglu" in refused(refusal, source, run, config, *other)
    config = config_in(tmp_path, tokens, pc__level=4)
    assert "pc must be null" in refused(refusal, source, run, config)
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    new = ["--write-config", str(tmp_path / "new.yaml")]
    assert "model_type must be one of llama, " in refused(refusal, source, run, config, *new)


CASES = ["twice", "two sets of files", "another tied head", "a tied head of another type"]


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_transformers_takes_from_elsewhere_are_refused(
    case, tokens, tmp_path, refusal
) -> None:
    config, source = config_in(tmp_path, tokens), tmp_path / "theirs"
    tensors = their_model(source, config, shards="100KB")
    settings = json.loads((source / "config.json").read_text())
    if case == "twice":
        files = {path: load_file(path) for path in source.glob("*.safetensors")}
        path = next(path for path, held in files.items() if "lm_head.weight" not in held)
        save_file({**files[path], "lm_head.weight": tensors["lm_head.weight"] + 1}, path)
        wanted = "must be in only one file, got several"
    elif case == "two sets of files":
        save_file(tensors, source / "model.safetensors")
        wanted = "got both"
    else:
        settings["tie_word_embeddings"] = True
        (source / "config.json").write_text(json.dumps(settings))
        config = config_in(tmp_path, tokens, model__tie_embeddings=True)
        if case == "a tied head of another type":
            paths = source.glob("*.safetensors")
            [path] = [path for path in paths if "lm_head.weight" in load_file(path)]
            same = tensors["model.embed_tokens.weight"].half()
            save_file({**load_file(path), "lm_head.weight": same}, path)
        wanted = "lm_head.weight must equal model.embed_tokens.weight"
    assert wanted in refused(refusal, source, tmp_path / "imported", config)


@pytest.mark.parametrize("family", slow_but([*READABLE], [*READABLE, "llama 3.2", "all biases"]))
def test_the_model_section_is_written(family, tokens, tmp_path, capsys, refusal, monkeypatch):
    config = config_in(tmp_path, tokens, **MODELS[family])
    source, run, new = tmp_path / "theirs", tmp_path / "imported", tmp_path / "new.yaml"
    their_model(source, config)
    wanted = load_config(config).model
    other = config_in(tmp_path, tokens, model__layers=3, model__hidden=128)
    written = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**written, "is_causal": False}))
    assert "is_causal" in refused(refusal, source, run, other, "--write-config", str(new))
    assert not new.exists()
    (source / "config.json").write_text(json.dumps(written))
    line = ["import", str(source), str(run), "--config", str(other), "--write-config", str(new)]
    monkeypatch.chdir(tmp_path)
    Path("runs/imported").mkdir(parents=True)  # with this folder, a run would continue
    assert main(line) == 0
    said = capsys.readouterr().out
    assert f"--config {new} run.dir=runs/imported.1 checkpoint.initialize_from=" in said
    assert model_settings(load_config(new).model) == model_settings(wanted)
    assert load_config(new).optimizer == load_config(other).optimizer
    assert f"target {run} already exists" in refusal(main(line))
    line[2] = str(tmp_path / "another")
    assert f"--write-config {new} already exists" in refusal(main(line))


def test_data_of_another_tokenizer_must_be_prepared_again(tokens, tmp_path, capsys) -> None:
    for name, ids in (("own", 100), ("other", 100), ("many", 200)):
        vocab = {f"{name}{i}": i for i in range(ids)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": f"{name}0"}
        (tmp_path / name).write_text(json.dumps({"version": "1.0", "model": model}))
    config = config_in(tmp_path, tokens, model__vocab_size=120)
    source = tmp_path / "theirs"
    their_model(source, config)
    shutil.copy(tmp_path / "own", source / "tokenizer.json")
    reasons = {
        "own": "",
        "other": "the data's tokenizer is not the model's tokenizer",
        "many": "the data's tokenizer has 200 token ids, but the model has 120",
    }
    for name, reason in reasons.items():
        run = tmp_path / f"imported {name}"
        line = ["import", str(source), str(run), "--config", str(config)]
        if name == "many":
            line += ["--write-config", str(tmp_path / "new.yaml")]
        assert main([*line, f"data.tokenizer={tmp_path / name}"]) == 0
        said = capsys.readouterr().out
        assert ("float32 weights; to train them:\n    python pretrain.py" in said) == (not reason)
        assert f"--tokenizer '{run}' --output" in said or not reason
        assert reason in said and "python pretrain.py --config" in said


@pytest.mark.parametrize("twice", slow_but([True], [False, True]))
def test_a_tied_head_stays_tied(twice, tokens, tmp_path, world, capsys) -> None:
    """Gemma 2 is published with tied embeddings. Some files also contain the head, which equals the
    embedding."""
    config = config_in(tmp_path, tokens, **GEMMA2, model__tie_embeddings=True)
    source, run, out = (tmp_path / name for name in ("theirs", "imported", "out"))
    tensors = their_model(source, config)
    assert "lm_head.weight" not in tensors
    if twice:
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tensors | head, source / "model.safetensors", {"format": "pt"})
    assert main(["import", str(source), str(run), "--config", str(config)]) == 0
    assert not any("head" in name for name in tensors_of(read_checkpoint(run), "weight/"))
    start = load_config(config, [f"checkpoint.initialize_from={run}", "train.exit_step=2"])
    train(start, world)
    for place in (run, Path(start.run.dir)):
        assert main(["export", str(place), str(out / place.name), "--no-tokenizer"]) == 0
        difference = re.search(r"differ by at most ([0-9.e-]+)", capsys.readouterr().out)
        assert float(difference[1]) < 1e-5
        assert load_file(out / place.name / "model.safetensors").keys() == tensors.keys()
        assert json.loads((out / place.name / "config.json").read_text())["tie_word_embeddings"]


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 131_072,
}
LLAMA3_2 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED = {
    "Llama 3.2 1B": LlamaConfig(
        **SMALL, rope_theta=5e5, rope_scaling=LLAMA3_2, tie_word_embeddings=True, head_dim=16
    ),
    "Qwen2.5 0.5B": Qwen2Config(
        **SMALL, rope_theta=1e6, tie_word_embeddings=True, use_sliding_window=False,
        sliding_window=32_768, max_window_layers=21,
    ),
    "Qwen3 0.6B": Qwen3Config(**SMALL, rope_theta=1e6, tie_word_embeddings=True, head_dim=24),
    "Gemma 2 2B": Gemma2Config(**SMALL, head_dim=24, query_pre_attn_scalar=24, sliding_window=8),
}  # fmt: skip
"""Small models that transformers creates with the settings, other than sizes, of published models.
"""


@pytest.mark.parametrize("name", slow_but(["Llama 3.2 1B", "Qwen2.5 0.5B"], [*PUBLISHED]))
def test_a_model_of_transformers_comes_back_as_it_was(name, tokens, tmp_path, world) -> None:
    base = config_in(tmp_path, tokens)
    source, run, out, new = (tmp_path / each for each in ("theirs", "run", "out", "new.yaml"))
    theirs = AutoModelForCausalLM.from_config(PUBLISHED[name])
    with torch.no_grad():
        for value in theirs.parameters():
            value.normal_(std=0.2)
    theirs.save_pretrained(source)
    line = ["import", str(source), str(run), "--config", str(base), "--write-config", str(new)]
    assert main(line) == 0
    assert load_config(new).model.tie_embeddings
    assert main(["export", str(run), str(out), "--no-tokenizer"]) == 0
    ours = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(40)[None] * 7 % 120
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    first, second = (load_file(each / "model.safetensors") for each in (source, out))
    assert "lm_head.weight" not in first and first.keys() == second.keys()


def test_a_tied_head_and_a_head_are_different_models(tokens, tmp_path, refusal) -> None:
    apart = config_in(tmp_path, tokens)
    source, run, new = tmp_path / "theirs", tmp_path / "imported", tmp_path / "new.yaml"
    tied = "tie_word_embeddings must be {1} to match the config's model, got {0}"
    their_model(source, apart)
    line = refused(refusal, source, run, apart, "model.tie_embeddings=true")
    assert tied.format(False, True) in line
    shutil.rmtree(source)
    their_model(source, config_in(tmp_path, tokens, model__tie_embeddings=True))
    apart = config_in(tmp_path, tokens)
    assert tied.format(True, False) in refused(refusal, source, run, apart)
    write = ["--config", str(apart), "--write-config", str(new)]
    assert main(["import", str(source), str(run), *write]) == 0
    assert load_config(new).model.tie_embeddings


@pytest.mark.parametrize("place", ["rope_parameters", "config"])
def test_heads_that_are_turned_in_part_are_another_model(place, tokens, tmp_path) -> None:
    """The versions of transformers store the rotated share of a head under different keys."""
    wanted = model_settings(load_config(config_in(tmp_path, tokens, **MOE)).model)
    assert differences(wanted, wanted) == []
    found, half = dict(wanted), {"partial_rotary_factor": 0.5}
    if place == "config":
        del found["rope_parameters"]
        found |= half
    else:
        found["rope_parameters"] = wanted["rope_parameters"] | half
    (said,) = differences(wanted, found)
    assert said == "partial_rotary_factor must be 1.0 to match the config's model, got 0.5"


def test_the_base_of_rotary_positions_is_read_where_each_version_of_transformers_keeps_it():
    settings = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
        "rms_norm_eps": 1e-6,
    }
    for place in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}):
        assert model_section(settings | place)["rope_base"] == 5e5
