"""Functions of the project replaced wherever they are known by name, for the life of a process."""

import sys
from typing import Final

PACKAGES: Final = ("spectral", "models", "parallel", "training")
OWN: Final = "training.rehearsal."


def put(owner: object, name: str, thing: object) -> None:
    """Put `thing` in the place of an attribute of a module or class, which must have it.

    Raises AttributeError if it has not: what is to be replaced has moved.
    """
    getattr(owner, name)
    setattr(owner, name, thing)


def replace(old: object, new: object) -> None:
    """Put `new` in the place of a function in every module of the project that has imported it.

    Raises LookupError if none has but the rehearsal itself.
    """
    places = [
        (module, key)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in PACKAGES
        for key, value in list(vars(module).items())
        if value is old
    ]
    if all(module.__name__.startswith(OWN) for module, _ in places):
        raise LookupError(f"no module of the project has {old!r}")
    for module, key in places:
        setattr(module, key, new)
