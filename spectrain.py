"""The library under its installed name: in a checkout `spectrain` is the folder spectral/.

Both names import the same modules, so programs and packages of rules may use either.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import spectral


class Alias(MetaPathFinder, Loader):
    """Imports `spectrain.NAME` as `spectral.NAME`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for modules of the library, or None for other modules."""
        return ModuleSpec(fullname, self) if fullname.startswith("spectrain.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its name in the checkout."""
        module = importlib.import_module(f"spectral.{spec.name.removeprefix('spectrain.')}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced."""
        if (spec := module.__spec__) is not None:
            module.__spec__ = spec.loader_state


sys.meta_path.insert(0, Alias())
sys.modules["spectrain"] = spectral
