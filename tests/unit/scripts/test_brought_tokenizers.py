"""Tokenizers provided by users: lost text, and files that are not a tokenizer.json."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scripts.data import encoding
from scripts.prepare_data import main, parse
from tests.text_files import write_byte_level_tokenizer, write_jsonl
from training.data.manifest import read_manifest

PLAIN = [f"the cat {i} sat on the mat" for i in range(300)]


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    options = {"special_tokens": ["[UNK]", "<eod>"], "show_progress": False}
    trainer = trainers.WordPieceTrainer(vocab_size=200, **options)
    if isinstance(tokenizer.model, models.BPE):
        trainer = trainers.BpeTrainer(vocab_size=300, **options)
    tokenizer.train_from_iterator([*PLAIN, "▁"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def lower_case(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return saved(tokenizer, folder)


def metaspace(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return saved(tokenizer, folder)


def prefix_space(folder: Path) -> Path:
    path = write_byte_level_tokenizer(folder)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    return path


LOSSY: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "case": (lower_case, ["The Cat"], "100.0% of 1 decoded document, for example 'the cat' for "),
    "unknown": (lower_case, ["the cat"] * 49 + ["猫"], r"2\.0% of 50 .* '\[UNK\]' for '猫'"),
    "other bytes": (metaspace, ["the cat", "the é"], r"50\.0% of 2 decoded"),
    "form": (lower_case, ["the ﬁn"], r"100\.0% of 1 decoded"),
    "white space": (lower_case, ["the  cat"], r"100\.0% .*'the cat' for 'the  cat'"),
    "a space in front": (prefix_space, PLAIN, r"100\.0% of 300 .* for example ' the cat"),
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_tokenizer_that_loses_text_is_refused(name, tmp_path, capsys, refusal) -> None:
    make, documents, message = LOSSY[name]
    source = write_jsonl(tmp_path / "rows.jsonl", documents)
    eod = [] if make is prefix_space else ["--eod", "<eod>"]
    command = [f"a={source}", "--tokenizer", str(make(tmp_path)), *eod,
               "--output", str(tmp_path / "out")]  # fmt: skip
    rule = f"token set a: the tokenizer changes the text of {message}"
    said = refusal(main(command))
    assert re.search(f"error: {rule}", said), said
    assert "use a lossless tokenizer, or pass --allow-lossy" in said
    assert main([*command, "--allow-lossy"]) == 0
    assert re.search(f"warning: {rule}", capsys.readouterr().err)
    assert read_manifest(tmp_path / "out").sets["a.train"].documents == len(documents)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_up_to_one_percent_is_said(workers, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_CHARACTERS", 2000)
    source = write_jsonl(tmp_path / "rows.jsonl", [*PLAIN, "the Cat", *PLAIN])
    command = [f"a={source}", "--tokenizer", str(lower_case(tmp_path)), "--eod", "<eod>",
               "--workers", workers, "--output", str(tmp_path / "out")]  # fmt: skip
    assert main(command) == 0
    assert "changes the text of 0.2% of 601 decoded documents" in capsys.readouterr().err


def test_a_tokenizer_that_reads_the_end_token_in_text_is_named(tmp_path, capsys) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<eod>": 0, "cat": 1}, unk_token="<eod>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["cat cat"])
    command = [f"web={tmp_path}/a.jsonl", "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert "encodes the text '<eod>' as the end-of-document token" in capsys.readouterr().err


def test_loss_is_found_early(tmp_path, monkeypatch, capsys) -> None:
    """Lost text is found before 0.1% of the documents are encoded. Only samples of later documents
    are checked."""
    monkeypatch.setattr(encoding, "_CHUNK_CHARACTERS", 2000)
    documents = ["the Cat"] * 1500 + [f"late {i}" for i in range(9)]
    source = write_jsonl(tmp_path / "rows.jsonl", documents)
    command = [f"a={source}", "--tokenizer", str(lower_case(tmp_path)), "--eod", "<eod>",
               "--workers", "1", "--output", str(tmp_path / "out")]  # fmt: skip
    assert main(command) == 2
    decoded = re.search(r"100.0% of ([\d,]+) decoded", capsys.readouterr().err)
    assert decoded is not None and int(decoded[1].replace(",", "")) < 1400


FORMS = {
    "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02",  # SentencePiece
    "cl100k_base.tiktoken": b"aGVsbG8= 0\nIg== 1\n",
    "vocab.json": b'{"a": 0}',
}


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_tokenizers_are_refused_with_what_to_do(name, folder, tmp_path, refusal):
    source = write_jsonl(tmp_path / "rows.jsonl", PLAIN)
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text("{}")
    (home / name).write_bytes(FORMS[name])
    given = home if folder else home / name
    command = [f"a={source}", f"--output={tmp_path}/out"]
    said = refusal(main([*command, f"--tokenizer={given}"]))
    assert str(home / ("tokenizer.json" if folder else name)) in said
    assert f"AutoTokenizer.from_pretrained('{home}').save_pretrained('{home}-fast')" in said
    for wrong in (f"{given}s", tmp_path / "nowhere" / "tokenizer.json"):
        said = refusal(main([*command, f"--tokenizer={wrong}"]))
        assert str(wrong) in said and "to convert" not in said


@pytest.mark.parametrize("text", ["1000000000", "1_000_000_000", "1e9", "1E+9", "1.0e9", "1B", "1b",
                                  "1000M", "0.001T", "1000000k"])  # fmt: skip
def test_numbers_of_tokens_are_read_as_people_write_them(text: str) -> None:
    assert parse(["a=b", "--output=o", f"--tokens={text}"]).tokens == 10**9


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "1e-3", "B", "1e15", "1BB", "nan", "1e99", "0x10", "1,5", ""]
)
def test_what_is_no_number_of_tokens_is_refused(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["a=b", "--output=o", f"--tokens={text}"])
    assert "--tokens: must be an integer from 1 to 1e14, such as" in capsys.readouterr().err


@pytest.mark.parametrize(("in_config", "in_file"), [(None, True), (True, False)])
def test_a_tokenizer_that_exports_would_change_is_refused(in_config, in_file, tmp_path, capsys):
    """The tokenizer class in transformers would change the tokenizer if tokenizer_config.json
    contained `add_prefix_space`."""
    source = write_jsonl(tmp_path / "rows.jsonl", PLAIN)
    home = tmp_path / "model"
    home.mkdir()
    path = write_byte_level_tokenizer(home)
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    command = [f"a={source}", f"--tokenizer={home}", "--allow-lossy", "--overwrite",
               f"--output={tmp_path}/out"]  # fmt: skip
    content = json.loads(path.read_text())
    for there, here in ((in_config, in_file), (in_file, in_file)):
        content["pre_tokenizer"]["add_prefix_space"] = here
        path.write_text(json.dumps(content))
        more = {} if there is None else {"add_prefix_space": there}
        (home / "tokenizer_config.json").write_text(json.dumps(settings | more))
        code = main(command)
        said = capsys.readouterr().err
        assert code == (0 if there is here else 2), said
        assert ("cannot be exported: fix tokenizer_config.json" in said) == bool(code)
    (home / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": 3}))
    assert main(command) == 0
    assert f"warning: transformers cannot load {home}: " in capsys.readouterr().err
