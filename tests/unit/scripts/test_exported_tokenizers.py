"""Whatever the template, an exported tokenizer either gives the training tokens or is reported."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from scripts.convert_hf import main
from tests.run_configs import tiny_config
from tests.token_files import write_stream
from training.run import train

LINES = [
    f"A norm is the largest singular value of matrix {i * i}; é is a letter.\n" for i in range(300)
]
SPECIAL = ["<unk>", "<s>", "</s>"]
SIZE = 330


def byte_level(prefix_space: bool = False) -> Tokenizer:
    """Return a tokenizer like the one in GPT-2's file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that puts `<s>` before each text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama2() -> Tokenizer:
    """Return a tokenizer like the one in Llama 2's file, whose normalizer marks spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_template(tokenizer)


def bert() -> Tokenizer:
    """Return a tokenizer that adds tokens on both sides of a text."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return tokenizer


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, object]]] = {
    "template": (lambda: with_template(byte_level()), {}),
    "both sides": (bert, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "llama 2": (llama2, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "prefix space": (lambda: byte_level(True), {"add_prefix_space": True}),
}
"""A tokenizer of each kind, with its tokenizer_config.json."""


def tokenizer_in(folder, kind: str) -> Tokenizer:
    """Train a tokenizer, and write its folder."""
    make, settings = KINDS[kind]
    tokenizer = make()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "llama 2" else []
    trainer = BpeTrainer(
        vocab_size=SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    named["model_max_length"] = 4096  # of its own model
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    return tokenizer


@pytest.fixture
def trained(tmp_path, world):
    """A function that trains one step in tmp_path/NAME, on data for a kind of tokenizer, and
    returns the folder."""

    def start(kind: str, name: str = "run", **keys: object):
        if not (tmp_path / "source").exists():
            tokenizer = tokenizer_in(tmp_path / "source", kind)
            ids = [tokenizer.encode(line, add_special_tokens=False).ids + [2] for line in LINES]
            write_stream(tmp_path / "tokens", np.concatenate(ids).astype(np.uint16))
        common = {"model__vocab_size": SIZE, "data__tokenizer": tmp_path / "source"}
        common |= {"train__exit_step": 1, "checkpoint__interval": 1, "validation__samples": 2}
        common |= {"run__dir": tmp_path / name, "log__interval": 1, "train__micro_batch": 8}
        train(tiny_config(str(tmp_path), "adamw", **{**common, **keys}), world)
        return tmp_path / name

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_encodes_as_training_did(kind, trained, tmp_path, capsys) -> None:
    run, out = trained(kind), tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    said = capsys.readouterr().err
    own = Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(out)
    for text in (LINES[7], "é", LINES[3].strip() + "\n\nB"):
        assert theirs(text)["input_ids"] == own.encode(text, add_special_tokens=False).ids
    assert (theirs.eos_token_id, theirs.model_max_length) == (2, 32)
    if kind == "prefix space":
        assert "the tokenizer is lossy: 'In the beginning God' becomes ' In the begin" in said
    else:
        left_out = "<s>, </s>" if kind == "both sides" else "<s>"
        assert f"the template adds {left_out}, which" in said


def test_an_import_of_an_export_has_the_tokenizer_of_the_run(trained, tmp_path, capsys) -> None:
    """An export without the template does not change the tokenizer."""
    out, weights = tmp_path / "out", tmp_path / "imported"
    assert main(["export", str(trained("template")), str(out), "--no-verify"]) == 0
    config = ["--config", f"{tmp_path}/config.yaml", f"model.vocab_size={SIZE}"]
    assert main(["import", str(out), str(weights), *config]) == 0
    capsys.readouterr()
    trained("template", "new", checkpoint__initialize_from=weights)
    assert "warning: checkpoint.initialize_from" not in capsys.readouterr().out
    assert main(["export", str(weights), str(tmp_path / "again"), "--no-verify"]) == 0


def test_an_imported_model_keeps_its_template(trained, tmp_path) -> None:
    out, weights, again = (tmp_path / name for name in ("out", "imported", "again"))
    assert main(["export", str(trained("template")), str(out), "--no-verify"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((tmp_path / "source" / name).read_bytes())
    config = ["--config", f"{tmp_path}/config.yaml", f"model.vocab_size={SIZE}"]
    assert main(["import", str(out), str(weights), *config]) == 0
    assert main(["export", str(weights), str(again)]) == 0
    assert AutoTokenizer.from_pretrained(again)("A")["input_ids"][0] == 1


def test_no_tokenizer_is_said_and_not_replaced(trained, tmp_path, capsys) -> None:
    """A message is printed, and the tokenizer of the base config is not used instead."""
    out, weights, again = (tmp_path / name for name in ("out", "imported", "again"))
    assert main(["export", str(trained("template")), str(out), "--no-tokenizer"]) == 0
    assert "The folder contains no tokenizer." in (out / "README.md").read_text()
    assert "AutoTokenizer" not in (out / "README.md").read_text()
    config = ["--config", f"{tmp_path}/config.yaml", f"model.vocab_size={SIZE}"]
    config.append(f"data.tokenizer={tmp_path}/source")
    assert main(["import", str(out), str(weights), *config]) == 0
    assert f"note: {out} has no tokenizer.json" in capsys.readouterr().out
    assert main(["export", str(weights), str(again)]) == 2
    assert "had none; pass --tokenizer PATH, or --no-tokenizer" in capsys.readouterr().err
    trained("template", "new", checkpoint__initialize_from=weights)
    said = "the tokenizer of the weights is unknown, so token ids may have different meanings"
    assert f"warning: checkpoint.initialize_from: {said}" in capsys.readouterr().out
    assert said in (tmp_path / "new" / "events.jsonl").read_text()
    given = ["--tokenizer", str(tmp_path / "source")]
    assert main(["export", str(weights), str(again), *given]) == 0
    assert "was not checked, because the checkpoint does not record" in capsys.readouterr().err


def test_a_class_that_transformers_forces_on_a_model_is_refused_with_a_way_out(
    trained, tmp_path, refusal
) -> None:
    """transformers 5 loads every Qwen2 model's tokenizer as Qwen2Tokenizer, which splits the text
    into single digits."""
    run, out = trained("template", model__attention_bias="qkv"), tmp_path / "out"
    said = refusal(main(["export", str(run), str(out)]))
    assert "transformers' Qwen2Tokenizer must encode text as tokenizer.json does" in said
    assert "pass --no-tokenizer, and load the tokenizer with PreTrainedTokenizerFast" in said
    assert main(["export", str(run), str(out), "--no-tokenizer"]) == 0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth", None])
def test_weights_in_other_files_are_named(name, trained, tmp_path, refusal) -> None:
    out = tmp_path / "out"
    assert main(["export", str(trained("template")), str(out), "--no-verify"]) == 0
    (out / "model.safetensors").rename(tmp_path / "elsewhere")
    if name is not None:
        (out / name).write_bytes(b"weights")
    config = ["--config", f"{tmp_path}/config.yaml", f"model.vocab_size={SIZE}"]
    said = refusal(main(["import", str(out), str(tmp_path / "imported"), *config]))
    assert f"{out} must contain model.safetensors" in said
    assert name is None or f"got only {name}; convert the weights with tr" in said
    (out / "model-00001-of-00002.safetensors").write_bytes(b"weights")
    said = refusal(main(["import", str(out), str(tmp_path / "imported"), *config]))
    lists = "must contain model.safetensors.index.json, which lists the tensors in model-00001-of"
    assert f"{out} {lists}" in said and "download or copy this file again" in said
