"""Compatibility with several megatron-core releases, and a check for Triton's C compiler.

Features are detected rather than inferred from the version. Releases older than those in `TESTED`
raise an error; newer ones cause a warning.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, cast

import torch
from packaging.version import Version
from torch import Tensor

TESTED: Final = ("0.16.1", "0.19.2")
"""Oldest and newest tested release."""

QUIET: Final = (
    "torch.utils.cpp_extension",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.transformer.transformer_layer",
)
"""Loggers of a missing CUDA toolkit, and of advice to use other classes."""


class EngineError(RuntimeError):
    """Raised when megatron-core is missing or not supported."""


def engine_version() -> str:
    """Return the megatron-core version. Raises EngineError if megatron-core is not installed.

    The suffix that newer releases append in a git checkout is dropped.
    """
    try:
        return Version(importlib.import_module("megatron.core.package_info").__version__).public
    except ImportError as error:
        raise EngineError(
            f"megatron-core {TESTED[0]} to {TESTED[1]} must be installed: {error}"
        ) from error


def check_engine() -> str | None:
    """Return a warning if the installed release is newer than any tested release, else None.

    Raises EngineError if the installed release is too old.
    """
    version = engine_version()
    oldest, newest = TESTED
    if Version(version) < Version(oldest):
        raise EngineError(f"megatron-core must be {oldest} or newer, got {version}")
    if Version(version) <= Version(newest):
        return None
    return f"megatron-core {version} is newer than {newest}, the newest tested release"


def import_engine() -> None:
    """Import megatron-core without its warnings and in half the usual time. Call this before
    anything else imports megatron-core.

    Four warnings are suppressed. The first is about missing optional packages. The second is about
    a missing CUDA toolkit, and comes from CUDA builds of PyTorch on machines without a GPU, such as
    login nodes. The third is about deprecated names of collectives in megatron-core, and comes from
    newer torch releases. The fourth advises users to switch to another model class, and comes from
    newer megatron-core releases.

    megatron-core functions decorated with torch.compile are compiled on their first call. If they
    were compiled at import, the compiler would be loaded for functions that most models never call.
    megatron-core's inference code is kept from importing wandb, which is not needed. Raises
    EngineError if megatron-core is not installed.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    deprecated = r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    compiler = torch.compile
    setattr(torch, "compile", at_first_call(compiler))  # noqa: B010
    hides = "wandb" not in sys.modules
    if hides:
        sys.modules["wandb"] = cast(ModuleType, None)
    try:
        with no_collection():
            engine_version()
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010
        if hides:
            del sys.modules["wandb"]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection within the context. During imports, the garbage collector would
    traverse all modules and free nothing. Processes forked within the context run without garbage
    collection."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


def at_first_call(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lazy version of `compiler` (torch.compile) that compiles functions on first call.

    Calls from other compiled functions are inlined. Objects that are not functions are compiled
    immediately.
    """

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not inspect.isfunction(model):
            return compiler(model, **options)
        compiled = functools.cache(lambda: compiler(model, **options))

        @functools.wraps(model)
        def call(*arguments: Any, **named: Any) -> Any:
            function = model if torch.compiler.is_compiling() else compiled()
            return function(*arguments, **named)

        return call

    return compile_later


def take_losses() -> dict[str, Tensor]:
    """Return megatron-core's recorded load-balancing losses, each `[layers]`, and clear them."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        # The tracker's own clear() would keep entries sized for the first model's layers.
        notes: Any = get_moe_metrics_tracker().metrics
        taken = {name: entry.values.clone() for name, entry in notes.items()}
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        notes = get_moe_layer_wise_logging_tracker()
        taken = {name: entry["values"].clone() for name, entry in notes.items()}
    notes.clear()
    return taken


PROBE = "#include <Python.h>\nint version(void) { return PY_VERSION_HEX; }\n"
PACKAGES = "gcc and python3-dev on Debian and Ubuntu, gcc and python3-devel on Fedora and RHEL"


def compiler_problem() -> str | None:
    """Return the missing dependency for Triton's C extensions, or None if Triton can compile
    them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return f"a C compiler (packages: {PACKAGES})"
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        options = "-x", "c", "-", "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/probe.so"
        try:
            done = subprocess.run([compiler, *options], input=PROBE, capture_output=True, text=True)
        except OSError as error:
            return f"a C compiler: {compiler} does not start ({error.strerror})"
    if done.returncode == 0:
        return None
    if "Python.h" in done.stderr:
        return f"Python.h, which is not in {include} (packages: {PACKAGES})"
    return f"a working C compiler: {compiler} printed {done.stderr.strip().splitlines()[:1]}"


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported."""
    return find_spec("transformer_engine") is not None
