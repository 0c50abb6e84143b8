"""The number of bytes per token, compared with the UTF-8 length of texts."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.prepare_data import main as prepare
from tests.text_files import write_byte_level_tokenizer
from training.data.hashes import file_sha256
from training.data.token_bytes import token_byte_lengths
from training.data.token_set import TokenSet
from training.data.validation_data import ValidationData
from training.errors import DataError


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_token_bytes_add_up_to_the_text(byte_level: Path, text: str) -> None:
    lengths = token_byte_lengths(byte_level)
    assert lengths is not None and lengths.dtype == torch.int32
    for written in (text, f"the hat{text}<tool é> die Möwe"):
        ids = Tokenizer.from_file(str(byte_level)).encode(written).ids
        assert int(lengths[ids].sum()) == len(written.encode("utf-8"))
    assert lengths[0] == 0  # the special token


def edited(path: Path, folder: Path, **sections: object) -> Path:
    content = json.loads(path.read_text()) | sections
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_bytes_are_not_claimed_for_other_tokenizers(byte_level: Path, tmp_path: Path) -> None:
    model = json.loads(byte_level.read_text())["model"]
    prefixing = {"type": "ByteLevel", "add_prefix_space": True}
    removing = {"type": "Split", "behavior": "Removed"}

    def sequence(step: dict[str, str]) -> dict[str, object]:
        plain = prefixing | {"add_prefix_space": False}
        return {"type": "Sequence", "pretokenizers": [step, plain]}

    without_a_byte = {key: id_ for key, id_ in model["vocab"].items() if key != "Q"}
    for sections in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": prefixing},
        {"model": {"type": "WordLevel", "vocab": model["vocab"]}},
        {"model": model | {"vocab": without_a_byte}},
        {"model": model | {"vocab": model["vocab"] | {"▁the": 900}}},
        {"model": model | {"end_of_word_suffix": "</w>"}},
        {"normalizer": {"type": "Lowercase"}},
        *({"pre_tokenizer": sequence(step)} for step in ({"type": "Whitespace"}, removing)),
    ):
        assert token_byte_lengths(edited(byte_level, tmp_path, **sections)) is None
    for step in ({"type": "Digits"}, removing | {"behavior": "Isolated"}):
        folder = edited(byte_level, tmp_path, pre_tokenizer=sequence(step))
        assert token_byte_lengths(folder) is not None


@pytest.mark.parametrize("side", [("lstrip",), ("rstrip",), ("lstrip", "rstrip")])
@pytest.mark.parametrize("special", [False, True])
def test_bytes_are_not_claimed_if_added_tokens_remove_spaces(side, special, byte_level, tmp_path):
    tokens = json.loads(byte_level.read_text())["added_tokens"]
    added = tokens[-1] | {"id": 999, "content": "CODE", "special": special}
    folder = edited(byte_level, tmp_path, added_tokens=[*tokens, added | dict.fromkeys(side, True)])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # as in data preparation
    ids = tokenizer.encode("the  CODE  hat").ids
    kept = tokenizer.decode(ids, skip_special_tokens=False) == "the  CODE  hat"
    assert kept is special and (token_byte_lengths(folder) is not None) is special


@pytest.mark.parametrize("wrong", [-1, 10**12, "7", None, 5])
def test_an_id_that_is_wrong_is_named(wrong: object, byte_level: Path, tmp_path: Path) -> None:
    model = json.loads(byte_level.read_text())["model"]
    folder = edited(byte_level, tmp_path, model=model | {"vocab": {**model["vocab"], "Qu": wrong}})
    with pytest.raises(DataError, match=r"ids must be integers in \[0, 2\^24\]|ids must be unique"):
        token_byte_lengths(folder)


def test_missing_or_foreign_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer file .*tokenizer\.json does not exist"):
        token_byte_lengths(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="section 'model' is missing"):
        token_byte_lengths(tmp_path)


@pytest.mark.parametrize("sequence", [[], [{"type": "Sequence", "normalizers": []}]])
def test_an_empty_normalizer_changes_nothing(byte_level, tmp_path, sequence) -> None:
    """DeepSeek's tokenizer has such a normalizer."""
    normalizer = {"type": "Sequence", "normalizers": sequence}
    lengths = token_byte_lengths(edited(byte_level, tmp_path, normalizer=normalizer))
    assert torch.equal(lengths, token_byte_lengths(byte_level))
    normalizer["normalizers"] = [{"type": "NFC"}, *sequence]
    assert token_byte_lengths(edited(byte_level, tmp_path, normalizer=normalizer)) is None


@pytest.mark.parametrize("samples", [1, 3, 20, 37, None])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_bytes_of_the_windows_that_were_read_are_counted(tmp_path, samples, with_manifest) -> None:
    """Test a tokenizer whose words include spaces. The reference is computed from the positions of
    tokens in the text."""
    texts = [f"x{'é' * (i % 5)} the cat {'abcdefgh'[: i % 7]} {i}" for i in range(60)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<eod>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    assert prepare([f"a={tmp_path}/rows.jsonl", f"--tokenizer={tmp_path}/tokenizer.json",
                    f"--output={tmp_path}/out"]) == 0  # fmt: skip
    sizes = []
    for text in texts:
        ends = [end for _, end in tokenizer.encode(text).offsets]
        pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        sizes += [*(len(piece.encode()) for piece in pieces), 0]
    if not with_manifest:
        (tmp_path / "out/manifest.json").unlink()
    path = tmp_path / "out/tokenizer.json"
    tokens = TokenSet("a", tmp_path / "out/a.train", 16)
    data = ValidationData(
        tokens, samples=samples, token_bytes=token_byte_lengths(path), tokenizer=path
    )
    assert len(sizes) == data.set.tokens and data.samples == min(samples or 10**9, len(data.set))
    assert data.target_bytes == sum(sizes[1 : data.target_tokens + 1])


def test_a_tokenizer_that_the_kernel_makes_is_not_read():
    """Reading the file would wait for the next message from the kernel."""
    with pytest.raises(DataError, match="Not a file on disk"):
        token_byte_lengths("/proc/kmsg")
    with pytest.raises(DataError, match="Not a file on disk"):
        file_sha256("/proc/kmsg")
