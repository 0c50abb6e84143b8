"""A book from the bundled corpus as bytes, with a vocabulary of 256 tokens and no tokenizer."""

import lzma
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256


def text() -> Tensor:
    """Return the book as a uint8 tensor `[bytes]`."""
    book = Path(__file__).parent / "data" / "devils_dictionary.txt.xz"
    return torch.frombuffer(bytearray(lzma.decompress(book.read_bytes())), dtype=torch.uint8)


def batch(book: Tensor, size: int, length: int, seed: int) -> Tensor:
    """Return tokens `[size, length]` from random positions in `book`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(book) - length, (size, 1), generator=generator)
    return book[starts + torch.arange(length)].long()
