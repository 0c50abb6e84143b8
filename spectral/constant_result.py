"""Functions whose result is kept, and which torch.compile takes as a constant."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

MOST_RESULTS = 4096


class Constant(Protocol[P, R]):
    """A function whose results are kept."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result, computed at the first call with these arguments."""

    def cache_clear(self) -> None:
        """Forget all results."""


def constant_result(function: Callable[P, R]) -> Constant[P, R]:
    """Keep the results of a function, and mark it as `torch.compiler.assume_constant_result` does.

    That one imports the compiler, which takes as long as all of torch. Tensors among the results
    are copied to their device once: a step that copied them would wait for the copy and could not
    be recorded as a CUDA graph. They are not to be written to.
    """
    cached = lru_cache(MOST_RESULTS)(function)

    @wraps(function)
    def result(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    result._dynamo_marked_constant = True  # type: ignore[attr-defined]
    result.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return result  # type: ignore[return-value]


@constant_result
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor; not to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)
