"""What differs between releases of megatron-core: asked of the installed engine, not of its number.

The releases from the first to the last of `TESTED` are used as they are. An older one is refused; a
newer one must have, before a run starts, everything that the project's files take from it.
"""

import ast
import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.version import Version
from torch import Tensor

TESTED: Final = ("0.16.1", "0.19.2")
"""Oldest and newest release that the tests run with."""

ROOT: Final = Path(__file__).resolve().parent.parent
WINGS: Final = ("models", "parallel", "training")
"""The folders that must find everything they import from the engine."""

OPTIONAL: Final = ("models/engine.py", "models/blocks/transformer_engine.py")
"""Files that ask whether the engine has something, or say themselves that it is missing."""


ADVISERS: Final = (
    "dist_checkpointing.strategies",
    "models.gpt.gpt_model",
    "transformer.transformer_layer",
)
"""Modules of the engine that log advice."""


class EngineError(RuntimeError):
    """The installed megatron-core cannot be used."""


class Use(NamedTuple):
    """A name that a file takes from a module of the engine, and the keywords it is called with."""

    module: str
    name: str
    file: str
    keywords: frozenset[str] = frozenset()


def engine_version() -> str:
    """Return the version of megatron-core; raises EngineError if it is not installed.

    Without the suffix that newer releases take from the git checkout they are used in.
    """
    try:
        return Version(importlib.import_module("megatron.core.package_info").__version__).public
    except ImportError as error:
        raise EngineError(
            f"megatron-core must be installed, {TESTED[0]} to {TESTED[1]}, got: {error}"
        ) from error


def check_engine() -> str | None:
    """Return what to say of a release that is newer than the tested ones, None for a tested one.

    Raises EngineError for a release that is too old, or lacks what the project takes from it.
    """
    found = engine_version()
    oldest, newest = TESTED
    if Version(found) < Version(oldest):
        raise EngineError(f"megatron-core must be {oldest} or newer, got {found}")
    if Version(found) <= Version(newest):
        return None
    absent = dict.fromkeys(text for use in uses() if (text := missing(use)) is not None)
    if absent:
        raise EngineError(
            f"megatron-core {found} is newer than {newest}, the newest tested, and lacks "
            + "; ".join(absent)
        )
    return (
        f"megatron-core {found} is newer than {newest}, the newest tested; all that the project "
        "takes from it is there"
    )


def missing(use: Use) -> str | None:
    """Return what the installed engine lacks of a use, None if nothing."""
    whole = f"{use.module}.{use.name}"
    try:
        module = importlib.import_module(use.module)
        found: Any = getattr(module, use.name, None) or importlib.import_module(whole)
    except ImportError:
        return f"{whole} (for {use.file})"
    refused = sorted(keyword for keyword in use.keywords if not accepts(found, keyword))
    return f"arguments {', '.join(refused)} of {whole} (for {use.file})" if refused else None


def accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether `function` takes the argument `keyword`."""
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == keyword or each.kind is each.VAR_KEYWORD for each in parameters)


def uses() -> Iterator[Use]:
    """Yield what the project's files import from the engine and call of it, in the files' order."""
    for path in sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file not in OPTIONAL:
            yield from uses_of(path.read_text(encoding="utf-8"), file)


def uses_of(source: str, file: str) -> Iterator[Use]:
    """Yield the uses of one file's source."""
    tree = ast.parse(source)
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
            for alias in node.names:
                imported[alias.asname or alias.name] = (str(node.module), alias.name)
                yield Use(str(node.module), alias.name, file)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = frozenset(each.arg for each in node.keywords if each.arg is not None)
        if isinstance(node.func, ast.Name) and node.func.id in imported:
            yield Use(*imported[node.func.id], file, keywords)
        elif (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in imported
            and imported[node.func.value.id][1].islower()  # a module, not a class
        ):
            yield Use(".".join(imported[node.func.value.id]), node.func.attr, file, keywords)


def own_writer(save: Callable[..., Any]) -> dict[str, str]:
    """Return the argument with which `async_save` of a strategy uses the engine's own writer.

    Newer releases write by nvidia-resiliency-ext unless they are told otherwise.
    """
    return {"async_strategy": "mcore"} if accepts(save, "async_strategy") else {}


def import_quietly() -> None:
    """Silence, from here on, what the engine's import says of the machine.

    It warns about optional packages that are done without, and PyTorch's builds for CUDA log where a
    CUDA toolkit lies if the machine has no GPU, such as a login node.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Context in which the engine gives no advice on how it should be used.

    Newer releases tell users to take another writer or model class, and call PyTorch's loader in
    ways of which PyTorch warns.
    """
    loggers = [logging.getLogger(f"megatron.core.{name}") for name in ADVISERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for text in ("The argument order of", "torch.distributed is disabled"):
                warnings.filterwarnings("ignore", text, UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def take_losses() -> dict[str, Tensor]:
    """Return what the engine has noted of each balancing loss `[layers]`, and clear its notes."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        # Its own clear() would keep rooms for the layers of the model that noted first.
        notes: Any = get_moe_metrics_tracker().metrics
        taken = {name: entry.values.clone() for name, entry in notes.items()}
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        notes = get_moe_layer_wise_logging_tracker()
        taken = {name: entry["values"].clone() for name, entry in notes.items()}
    notes.clear()
    return taken
