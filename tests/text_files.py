"""Write tokenizers and small text files in all formats, and read prepared sets."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Several scripts, a four-byte emoji, and a special token as plain text.
TEXTS = [
    "The quick brown fox.\n", "Die Möwe lacht über <|endoftext|> am Meer.", "猫と帽子 🐈\n\n",
    *(f"Line {i}: the cat sat on the mat, the hat and the bat.\n" for i in range(60)),
]  # fmt: skip


def write_byte_level_tokenizer(folder: Path) -> Path:
    """Write the tokenizer.json of a byte-level BPE with at most 300 tokens, where `<|endoftext|>`
    is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat, the hat — der Hut, die Möwe, 猫と帽子"] * 4, trainer)
    tokenizer.add_tokens(["<tool é>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def documents(folder: Path, name: str, *, keep_eod: bool = False) -> list[list[int]]:
    """Read a set's documents with the struct module, independently of the code under test."""
    index = (folder / f"{name}.idx").read_bytes()
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, borders) == (b"MMIDIDX\0\0", 1, sequences + 1)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    tokens = np.fromfile(folder / f"{name}.bin", dtype={8: "<u2", 4: "<i4"}[code]).tolist()
    found, start = [], 0
    for length in lengths:
        found.append(tokens[start : start + length])
        start += length
    assert start == len(tokens)
    return found if keep_eod else [each[:-1] for each in found]


def texts(folder: Path, name: str) -> list[str]:
    """Read a set's documents as text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(folder, name)]


def write_jsonl(path: Path, rows: list[str], key: str = "text") -> Path:
    """Write a JSON lines file and return its path."""
    path.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))
    return path


def lines(rows: list[str]) -> bytes:
    """Encode rows as JSON lines."""
    return "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd_frames(rows: list[str]) -> bytes:
    """Encode rows as JSON lines in two zstd frames, as parallel compressors do."""
    frames = (lines(rows[:7]), lines(rows[7:]))
    return b"".join(pyarrow.compress(each, codec="zstd", asbytes=True) for each in frames)


def hugging_face_folder(source: Path, folder: Path, special: int, configs: dict[str, dict]) -> Path:
    """Write a folder with a tokenizer.json that has additional special tokens <s0>, <s1>, ..."""
    tokenizer = Tokenizer.from_file(str(source))
    tokenizer.add_special_tokens([f"<s{i}>" for i in range(special)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content))
    return folder
