"""scripts/convert_hf.py export in one process: the folder, its contents, and errors."""

import json
import logging
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.families import all_units
from parallel.comm import groups
from scripts.convert_hf import main, parse
from scripts.generate import main as generate
from scripts.huggingface import export as exporting
from scripts.huggingface.equivalence import our_logits, verify
from scripts.huggingface.tokenizer_files import settings_of
from tests.export_cases import MOE
from tests.failing_disk import largest_file
from tests.run_configs import tiny_config
from tests.run_results import tensors_of
from tests.token_files import prepare_text
from tests.unit.training.checkpoint.test_checkpoint import poison
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.stored_checkpoint import CheckpointWeights
from training.errors import BrokenCheckpointError, InputError, printable
from training.run import train

TEXT = (
    "A spectral norm is the largest singular value of a matrix; {i} is a number, é is a letter.\n\n"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A prepared folder with a trained tokenizer, its settings and the sets `tokens`."""
    folder = prepare_text(tmp_path_factory.mktemp("data"), TEXT, 800)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ message }}"}))
    return folder


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    """Returns the folder of a run of one step. Keywords are config keys with `__` in place of dots.
    Calls with equal keywords return the same run."""
    found: dict[str, Path] = {}

    def folder(**keys: object) -> Path:
        if repr(keys) not in found:
            parent = tmp_path_factory.mktemp("trained")
            given = {
                "model__vocab_size": 300,
                "data__train__walk__path": f"{tokens}/tokens.train",
                "data__validation__walk__path": f"{tokens}/tokens.train",
                "validation__samples": 2,
                "train__steps": 3,
                "train__exit_step": 1,
                "train__micro_batch": 8,
                "checkpoint__interval": 1,
                **keys,
            }
            world = groups.initialize()
            train(tiny_config(str(parent), "adamw", **given), world)
            groups.shutdown()
            found[repr(keys)] = parent / "run"
        return found[repr(keys)]

    return folder


@pytest.fixture
def run(trained, tmp_path):
    """Copies the folder of a run from `trained` to tmp_path/run."""
    return lambda **keys: Path(shutil.copytree(trained(**keys), tmp_path / "run"))


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    """The export of the run that `trained` returns without keywords."""
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["export", str(trained()), str(out), "--no-verify"]) == 0
    return out


@pytest.fixture
def out(exported, tmp_path) -> Path:
    """A copy of the export `exported`."""
    return Path(shutil.copytree(exported, tmp_path / "out"))


def test_an_export_states_its_stage_and_gives_no_false_alarm(run, tmp_path, capsys, monkeypatch):
    """The text used in the check is longer than a sequence, but no model reads more than one
    sequence."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    folder = run()
    monkeypatch.setattr("training.report.text.FIRST", 0.001)
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    printed = capsys.readouterr()
    assert "loading the exported model in float32" in printed.err
    assert "verified: the float32 logits" in printed.out and "rounded" not in printed.out
    options = ["--dtype", "bfloat16"]
    assert main(["export", str(folder), str(tmp_path / "bfloat16"), *options]) == 0
    assert ", both models with weights rounded to bfloat16)" in capsys.readouterr().out
    assert [record.getMessage() for record in records] == []


def test_the_folder_is_complete(run, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    keys = {"rope_base": 5e4, "init__spectral": False, "init__std": "null"}
    folder = run(optimizer__roles__o__lr=4e-3, **{f"model__{key}": x for key, x in keys.items()})
    assert main(["export", str(folder), str(out), "--shard-size", "50KB"]) == 0
    assert "differ by at most" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 300 and config["max_position_embeddings"] == 32
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50_000
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["initializer_range"] == 64**-0.5
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 3
    tensors = Counter(index["weight_map"].values())
    large = [name for name in files if (out / name).stat().st_size > 51_200 + 2_000]
    assert [tensors[name] for name in large] == [1, 1]  # the embedding and the head
    sizes = {}
    for name in files:
        with safe_open(out / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            sizes |= {key: file.get_tensor(key).numel() for key in file.keys()}  # noqa: SIM118
    assert sizes.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_parameters"] == sum(sizes.values())
    assert index["metadata"]["total_size"] == 4 * sum(sizes.values())
    card = (out / "README.md").read_text()
    said = "| tokens | 256 |", "adamw, lr 0.003", "| o weights | lr 0.004 |", "| walk | "
    said = *said, f"| parameters | {sum(sizes.values()):,} |"  # without padding
    assert all(text in card for text in said) and not list(tmp_path.glob("out.*"))


def test_files_have_as_many_tensors_as_their_limit_allows(tmp_path) -> None:
    sizes = {"a": 4, "b": 4, "c": 4, "d": 4, "e": 12, "f": 2, "g": 6, "h": 1}
    values = {name: torch.rand(size) for name, size in sizes.items()}
    entries = {name: value.to("meta") for name, value in values.items()}
    exporting.write_shards(tmp_path, entries, values.items(), 32)
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert sorted("".join(sorted(file)) for file in files.values()) == ["ab", "cd", "e", "fg", "h"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(files)
    assert all(torch.equal(files[file][name], values[name])
               for name, file in index["weight_map"].items())  # fmt: skip


@pytest.mark.parametrize("trained", [True, False])
def test_an_export_replaces_some_settings_of_a_tokenizer(trained: bool) -> None:
    """Imported tokenizers keep their class and their template."""
    own = {"clean_up_tokenization_spaces": True, "pad_token": "P", "add_bos_token": True}
    own |= {"tokenizer_class": "LlamaTokenizer", "eos_token": "S", "model_max_length": 4096}
    replaced: dict[str, object] = {"eos_token": "E", "model_max_length": 8}
    if trained:
        replaced |= {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    content = settings_of(json.dumps(own).encode(), "E", 8, trained=trained)
    assert json.loads(content) == own | replaced


def test_the_tokenizer_goes_along(exported, tokens) -> None:
    out = exported
    assert (out / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = TEXT.format(i=49)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0 and tokenizer.bos_token is None
    assert tokenizer.chat_template == "{{ message }}"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == 0
    written = model.generate(**tokenizer("A matrix", return_tensors="pt"), max_new_tokens=4)
    assert written.shape[1] > 4


def test_a_run_and_its_export_write_the_same_text(run, tmp_path, capsys, refusal) -> None:
    folder, out = run(pc__level=4), tmp_path / "out"
    assert main(["export", str(folder), str(out), "--no-verify"]) == 0
    capsys.readouterr()
    texts = []
    for source in (out, folder, read_checkpoint(folder).path):
        assert generate([str(source), "A matrix", "--tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("A matrix") and texts == texts[:1] * 3
    assert generate([str(out), "A matrix"]) == 0  # as many tokens as fit
    assert "--tokens must be at most" in refusal(generate([str(out), "A matrix", "--tokens", "40"]))
    assert "must have at least one token" in refusal(generate([str(out), ""]))
    assert generate([str(out), "A matrix " * 40]) == 2
    assert "the prompt must be shorter than the model's" in capsys.readouterr().err
    surprises = {"num_beams": 3, "repetition_penalty": 9.0, "do_sample": True, "max_length": 3}
    (out / "generation_config.json").write_text(json.dumps(surprises))
    assert generate([str(out), "A matrix", "--tokens", "8"]) == 0
    assert capsys.readouterr().out == texts[0]
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | {"eos_token_id": [0, 1]}))
    assert generate([str(out), "A<|endoftext|>matrix", "--tokens", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("A<|endoftext|>matrix")
    assert said.err == "<|endoftext|> in the prompt is read as a special token, not as text\n"
    (out / "config.json").write_text(json.dumps(settings))
    drawn = []
    for seed in "112":
        sampling = ["--tokens", "8", "--temperature", "5", "--seed", seed]
        assert generate([str(out), "A matrix", *sampling]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    # The whole distribution at the temperature, of which transformers by default uses 50 tokens.
    model, tokenizer = (kind.from_pretrained(out) for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("A matrix", return_tensors="pt")["input_ids"]
    first = int(model(ids).logits[0, -1].argmax())
    (out / "config.json").write_text(json.dumps(settings | {"eos_token_id": [0, first]}))
    assert generate([str(out), "A matrix"]) == 0
    assert capsys.readouterr().out == "A matrix\n"  # without the second end token
    (out / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    for _ in range(8):
        probabilities = (model(ids).logits[:, -1].detach() / 5).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    assert drawn[0] == printable(tokenizer.decode(ids[0])) + "\n"
    assert "--seed requires --temp" in refusal(generate([str(out), "A matrix", "--seed", "1"]))
    settings = json.loads((out / "tokenizer.json").read_text())
    changed = Tokenizer.from_file(str(out / "tokenizer.json"))
    changed.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    changed.save(str(out / "tokenizer.json"))
    assert generate([str(out), "A matrix", "--tokens", "8"]) == 0
    ids = torch.tensor([[0, *tokenizer("A matrix")["input_ids"]]])
    for _ in range(8):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert capsys.readouterr().out == printable(tokenizer.decode(ids[0, 1:])) + "\n" != texts[0]
    for change, said in ({}, ""), ({"normalizer": {"type": "Lowercase"}}, "'a matrix'"):
        (out / "tokenizer.json").write_text(json.dumps(settings | change))
        assert generate([str(out), "A matrix", "--tokens", "2"]) == 0
        assert capsys.readouterr().err.partition("changes the prompt to ")[2].strip() == said


def test_a_token_that_the_tokenizer_lacks_is_named(run, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run(model__vocab_size=302)), str(out), "--no-verify"]) == 0
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"][:300] = 0  # one of the other two is above 0
    tensors["lm_head.weight"][301] = -tensors["lm_head.weight"][300]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert generate([str(out), "A matrix", "--tokens", "2"]) == 2
    assert "which is not in its tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["layer more", "layer less", "wider", "renamed", "NaN"])
def test_weights_that_are_not_those_of_the_config_are_refused(change, out, capsys):
    """transformers would initialize missing weights randomly, or generate from NaN logits."""
    settings, tensors = json.loads((out / "config.json").read_text()), {}
    if change in ("renamed", "NaN"):
        tensors = load_file(out / "model.safetensors")
        gain = tensors.pop("model.norm.weight")
        if change == "NaN":
            tensors["model.norm.weight"] = gain * float("nan")
        else:
            tensors["model.norm.gain"] = gain
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    elif change == "wider":
        settings["intermediate_size"] += 32
    else:
        settings["num_hidden_layers"] += 1 if change == "layer more" else -1
        settings.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps(settings))
    capsys.readouterr()
    assert generate([str(out), "A matrix", "--tokens", "2"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and len(said.err.splitlines()) == 1


def test_bfloat16_weights_are_the_rounded_ones(run, tmp_path) -> None:
    folder, out = run(pc__level=4), tmp_path / "out"
    assert main(["export", str(folder), str(out), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    stored = tensors_of(read_checkpoint(folder), "weight/")
    heads = [stored[f"weight/layers.1.q.{i}"] for i in range(4)]
    layer = model.model.layers[1]
    assert torch.equal(layer.self_attn.q_proj.weight, torch.cat(heads).bfloat16())
    assert not torch.equal(layer.mlp.down_proj.weight, stored["weight/layers.1.down"].bfloat16())


def test_a_model_that_is_another_is_not_written(run, tmp_path, monkeypatch, refusal) -> None:
    """Comparing logits reveals wrong settings that do not affect weights."""
    folder, out = run(), tmp_path / "out"
    honest = exporting.config_json

    def dishonest(*arguments: object, **options: object) -> dict[str, object]:
        content = honest(*arguments, **options)
        rope = {"rope_type": "default", "rope_theta": 9_000.0}
        return {**content, "rope_theta": 9_000.0, "rope_parameters": rope}

    monkeypatch.setattr(exporting, "config_json", dishonest)
    said = refusal(main(["export", str(folder), str(out)]))
    assert "logits must match the trained model's to within 0.0001" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    "keys", [{"attention_backend": "transformer_engine"}, {"attention_kernel": "flash_attention_3"}]
)
def test_models_are_compared_without_gpus(keys, trained, tmp_path, monkeypatch) -> None:
    """The machine used for the export may lack the kernels used in training."""
    weights, tokens = CheckpointWeights(read_checkpoint(trained())), torch.arange(20)[None]
    expected = our_logits(weights, tokens, torch.float32)
    config = weights.config
    weights.config = replace(config, model=replace(config.model, **keys))
    assert torch.equal(our_logits(weights, tokens, torch.float32), expected)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_missing_tensor_is_noticed(trained, out) -> None:
    tensors = load_file(out / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"missing_keys.*model\.norm\.weight"):
        verify(CheckpointWeights(read_checkpoint(trained())), out)


def refused(capsys, *arguments: object) -> str:
    """Return the error line of an export that must fail."""
    assert main(["export", *map(str, arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_what_is_no_checkpoint_is_refused(run, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert "nothing does not exist" in refused(capsys, tmp_path / "nothing", out)
    folder = run()
    for inner in (folder / "checkpoints", folder / "checkpoints" / "latest"):
        said = f"{inner} must be a run folder or a checkpoint, such as {folder} or {folder}/check"
        assert said in refused(capsys, inner, out)
    (tmp_path / "young").mkdir()
    shutil.copy(folder / "metrics.jsonl", tmp_path / "young")
    assert "young contains no checkpoint; " in refused(capsys, tmp_path / "young", out)
    (tmp_path / "young" / "config.json").touch()
    assert "convert_hf.py import" in refused(capsys, tmp_path / "young", out)
    step = folder / "checkpoints" / "step_00000001"
    info = read_checkpoint(step)
    for name in info.files:
        content = (step / name).read_bytes()
        (step / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(BrokenCheckpointError, match=re.escape(name)):
            exporting.raise_problems(info)
        (step / name).write_bytes(content)
    file = next(step.glob("state/*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "must have" in refused(capsys, step, out)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "has changed since it was written" in refused(capsys, step, out)
    (step / "COMPLETE").unlink()
    assert "no complete checkpoint" in refused(capsys, folder, out)
    assert not list(tmp_path.glob("out*"))


def test_weights_that_are_not_finite_are_refused(run, tmp_path, capsys) -> None:
    folder, out = run(), tmp_path / "out"
    poison("weight/layers.1.down", -70_000.0)(folder / "checkpoints" / "step_00000001")
    for options in ([], ["--format", "consolidated"]):
        said = refused(capsys, folder, out, "--dtype", "float16", *options)
        assert "down" in said and "at most 65504 in magnitude for float16, got 70000" in said
    poison("weight/embedding")(folder / "checkpoints" / "step_00000001")
    assert "weight/embedding" in refused(capsys, folder, out, "--no-verify")
    assert not list(tmp_path.glob("out*"))


def test_what_hugging_face_cannot_express_is_named(run, tmp_path, capsys) -> None:
    folder = run(model__family="gpt", model__activation="relu2")
    assert "model.activation must be swiglu" in refused(capsys, folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--shard-size", "5QB"], "must be a size such as 5GB, got 5QB"),
        (["--shard-size", "0MB"], "must be a size such as 5GB, got 0MB"),
        (
            ["--format", "consolidated", "--tokenizer", "x.json"],
            "--tokenizer has no effect with --format consolidated",
        ),
        (
            ["--format", "consolidated", "--no-verify"],
            "--no-verify has no effect with --format consolidated",
        ),
        (["train.steps=1"], "unrecognized arguments: train.steps=1"),
    ],
)
def test_wrong_options_of_an_export_are_refused(options, problem, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", "out", *options])
    assert ended.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("300", 300), ("50KB", 50_000), ("1.5 mb", 1_500_000), ("2GB", 2 * 10**9)]
)
def test_sizes_of_files_are_decimal(text, size) -> None:
    assert parse(["export", "run", "out", "--shard-size", text]).shard_size == size


def test_another_tokenizer_is_refused(run, tmp_path, tokens, capsys) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text((tokens / "tokenizer.json").read_text() + "\n")
    out = tmp_path / "out"
    assert "sha256" in refused(capsys, run(), out, "--tokenizer", other)
    said = refused(capsys, tmp_path / "run", out, "--tokenizer", tmp_path / "no")
    assert "does not exist; pass --tokenizer" in said
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(tokens / "tokenizer.json", folder)
    more = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["Q"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(more))
    assert "to tokenizer.json, got Q;" in refused(
        capsys, tmp_path / "run", out, "--tokenizer", folder
    )


def test_a_disk_that_is_too_small_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"requires .* GB"):
        exporting.check_room(tmp_path / "a" / "b", shutil.disk_usage(tmp_path).total)


def test_a_disk_that_fills_up_leaves_nothing(run, tmp_path, capsys) -> None:
    """A limit on file sizes simulates a full disk, so that writing fails halfway."""
    folder = run()
    with largest_file(100_000):
        assert "File too large" in refused(capsys, folder, tmp_path / "out", "--no-verify")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_consolidated_file_has_our_parameters(run, tmp_path) -> None:
    folder, out = run(**MOE, pc__level=4, pc__blocks="[o]"), tmp_path / "out"
    options = ["--format", "consolidated", "--dtype", "bfloat16"]
    assert main(["export", str(folder), str(out), *options]) == 0
    found = load_file(out / "model.safetensors")
    assert (out / "config.yaml").exists()
    stored, buffers = (tensors_of(read_checkpoint(folder), kind) for kind in ("weight/", "buffer/"))
    for unit in all_units(read_checkpoint(folder).config.model):
        part = unit.view(found[unit.parameter].view(unit.view_shape))
        same = torch.equal(part, stored[f"weight/{unit.name}"].bfloat16().view(part.shape))
        assert same != (unit.role == "o"), unit.name  # PC(W)
    assert buffers and all(each.any() for each in buffers.values())
    assert all(torch.equal(found[name[7:]], value) for name, value in buffers.items())
