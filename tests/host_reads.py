"""Find where a program reads tensors on the host; on a GPU each read would wait for the device.

On a CPU nothing waits, so the reads themselves are counted: Python's (`item`, `tolist`, `bool`,
`cpu`, ...) by a function mode, and operations whose result has a size that depends on values
(`nonzero`, `masked_select`, ...) by a dispatch mode. Predicates that a CPU alone looks at are not.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.comm import cpu
from tests.step_trace import as_on_a_device

READS: Final = ("tolist", "cpu", "numpy")
VALUES: Final = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Count the reads in a `with` block, by "operation at file:line"."""
    places: Counter[str] = Counter()

    def note(name: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _is_torch(frame.f_code.co_filename):
            frame = frame.f_back
        place = "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        places[f"{name} at {place}"] += 1

    with as_on_a_device(), _Functions(note), _Operations(note):
        yield places


class _Functions(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.note(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked and name != "index" and args[2].numel() == 1:
            masked = False  # torch turns it into masked_fill
        if name in VALUES or masked:
            self.note(f"{name} (mask)" if masked else name)
        return func(*args, **(kwargs or {}))


def _is_torch(file: str) -> bool:
    return "/torch/" in file or file in (__file__, cpu.__file__)
