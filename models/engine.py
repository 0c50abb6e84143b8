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
from collections.abc import Callable, Iterator, Mapping
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


class Forward(NamedTuple):
    """A class of the engine that one of ours passes arguments on to, but for its `own`."""

    module: str
    name: str
    own: frozenset[str]


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
        found: Any = importlib.import_module(use.module)
    except ImportError as error:
        if f"{use.module}.".startswith(f"{error.name}."):
            return f"{whole} (for {use.file})"
        return f"what it imports itself: {str(error).split(' (/')[0]}"
    try:
        for part in use.name.split("."):
            found = getattr(found, part, None) or importlib.import_module(whole)
    except ImportError:
        return f"{whole} (for {use.file})"
    refused = sorted(keyword for keyword in use.keywords if not accepts(found, keyword))
    return f"arguments {', '.join(refused)} of {whole} (for {use.file})" if refused else None


def accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether `function` takes the argument `keyword`."""
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == keyword or each.kind is each.VAR_KEYWORD for each in parameters)


def uses() -> Iterator[Use]:
    """Yield what the project's files take from the engine, in the files' order."""
    paths = sorted(path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    forwards: dict[str, Forward] = {}
    for source in files.values():
        forwards |= forwards_of(source)
    for file, source in files.items():
        if file not in OPTIONAL:
            yield from uses_of(source, file, forwards)


def forwards_of(source: str) -> dict[str, Forward]:
    """Return the classes of a file that pass arguments on to the engine's constructors."""
    tree = ast.parse(source)
    found = {}
    for derived, base in derived_classes(tree):
        constructor = methods(derived).get("__init__")
        if constructor is None:
            found[derived.name] = Forward(*base, frozenset())
        elif constructor.args.kwarg is not None:
            own = (*constructor.args.args[1:], *constructor.args.kwonlyargs)
            found[derived.name] = Forward(*base, frozenset(each.arg for each in own))
    return found


def uses_of(source: str, file: str, forwards: Mapping[str, Forward]) -> Iterator[Use]:
    """Yield the uses of one file's source, which may call the classes `forwards` of all files.

    They are names it imports, arguments it calls them with, and for classes derived from the
    engine's: methods of the base that it calls, and those that it has for the engine to call, which
    are all that the file itself does not ask `self` for.
    """
    tree = ast.parse(source)
    imported = engine_names(tree)
    for module, name in imported.values():
        yield Use(module, name, file)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        keywords = keywords_of(call)
        function = call.func
        if isinstance(function, ast.Name) and function.id in imported:
            yield Use(*imported[function.id], file, keywords)
        elif isinstance(function, ast.Name) and function.id in forwards:
            module, name, own = forwards[function.id]
            yield Use(module, name, file, keywords - own)
        elif (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id in imported
            and imported[function.value.id][1].islower()  # a module, not a class
        ):
            yield Use(".".join(imported[function.value.id]), function.attr, file, keywords)
    asked = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for derived, (module, name) in derived_classes(tree):
        for method in methods(derived):
            if not method.startswith("__") and f"self.{method}" not in asked:
                yield Use(module, f"{name}.{method}", file)
        for call in (node for node in ast.walk(derived) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "super()":
                method = call.func.attr
                whole = name if method == "__init__" else f"{name}.{method}"
                yield Use(module, whole, file, keywords_of(call))


def engine_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the module and the name in it of each name that a file imports from the engine."""
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
        for alias in node.names
    }


def derived_classes(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, tuple[str, str]]]:
    """Yield each class that derives from one of the engine, with that one's module and name."""
    imported = engine_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in imported:
                    yield node, imported[base.id]


def methods(tree: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return a class's methods by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def keywords_of(call: ast.Call) -> frozenset[str]:
    """Return the names of the arguments that a call passes by name."""
    return frozenset(each.arg for each in call.keywords if each.arg is not None)


def own_writer(save: Callable[..., Any]) -> dict[str, str]:
    """Return the argument with which `async_save` of a strategy uses the engine's own writer.

    Newer releases write by nvidia-resiliency-ext unless they are told otherwise.
    """
    return {"async_strategy": "mcore"} if accepts(save, "async_strategy") else {}


def import_quietly() -> None:
    """Silence, from here on, what the engine's import says of the machine.

    It warns about optional packages that are done without, and PyTorch's builds for CUDA log where
    a CUDA toolkit lies if the machine has no GPU, such as a login node.
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
