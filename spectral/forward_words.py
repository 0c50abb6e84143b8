"""Extracts names, operators and indices from the bytecode of forward passes."""

import dis
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial, partialmethod
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate, chain, takewhile
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

UNREAD = {"torch", "einops", "numpy", "apply_chunking_to_forward", *sys.stdlib_module_names}
"""Packages and functions whose code is not read, because their names are informative enough or
because they only split tokens."""
OPAQUE = "<opaque>"
"""Word for code that cannot be read: a C extension, a Triton kernel, an operator defined outside
torch, or a module that has not been imported yet."""
MOST = 200
"""Maximum number of functions to read per module."""


class ForwardWords:
    """Words (names, operators and indices) in modules' forward passes, in execution order.

    The name of a called function is followed by the function's words. Names of child modules start
    with a dot. For a child without parameters, the name is followed by the child's class name and
    words.
    """

    def __init__(self) -> None:
        self.known: dict[nn.Module, list[str]] = {}

    def of(self, module: nn.Module) -> list[str]:
        """Return the words in a module's forward pass."""
        if module not in self.known:
            self.known[module] = []  # in case the module contains itself
            children = dict(module.named_children())
            self.known[module] = self._read(module, children, module.forward, {})
        return self.known[module]

    def after(self, module: nn.Module, child: str) -> list[str]:
        """Return the words that follow a child's name in a module's forward pass.

        For a child of an `nn.Sequential`, the words end where the next sibling with parameters
        calls one of its child modules.
        """
        if not isinstance(module, nn.Sequential):
            words = self.of(module)
            return words[words.index(f".{child}") + 1 :] if f".{child}" in words else []
        children, words = dict(module.named_children()), list[str]()
        for name in [*children][[*children].index(child) + 1 :]:
            words += self._child(children, name)
            if not is_bare(children[name]):
                inner = self.of(children[name])
                return words + [*takewhile(lambda word: word[0] != ".", inner)]
        return words

    def _child(self, children: Mapping[str, nn.Module], name: str) -> list[str]:
        child = children[name]
        if not is_bare(child):
            return [f".{name}"]
        return [f".{name}", type(child).__name__.lower(), *self.of(child)]

    def _read(
        self,
        module: nn.Module,
        children: Mapping[str, nn.Module],
        function: Any,
        known: dict[CodeType, list[str]],
    ) -> list[str]:
        """Return the words in a function; cache the words of every function read in `known`."""
        if (graph := getattr(function, "inlined_graph", None)) is not None:  # a torch.jit function
            operations = re.findall(r"aten::(\w+)", str(graph))
            return ["Ellipsis" if word == "slice" else word for word in operations]
        function = inspect.unwrap(function)
        if _is_opaque(function):
            return [OPAQUE]
        function = function if hasattr(function, "__code__") else type(function).__call__
        code = getattr(function, "__code__", None)
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        if not isinstance(code, CodeType) or not UNREAD.isdisjoint((package, code.co_name)):
            return []
        if code not in known and len(known) == MOST:
            return [OPAQUE]
        if code not in known:
            known[code] = words = list[str]()  # in case the function calls itself
            local = _local_values(function)
            for path in _words(code):
                *outer, word = path.split(".")
                if word in children and len(outer) == 2 and not outer[0]:
                    words += self._child(children, word)
                    continue
                if outer == [""] and word not in local:
                    continue
                words += [word] if outer != [""] else []
                if "loss" in word:  # a loss only uses the model's outputs
                    continue
                for owner, called in _called(module, local, function.__globals__, path):
                    inner = self._read(owner, children if owner is module else {}, called, known)
                    twice = [w for i, w in enumerate(inner) if inner[:i].count(w) < 2]
                    words += [getattr(called, "__name__", word), *twice]
        return known.get(code, [])


def _is_opaque(function: Any) -> bool:
    """Return whether a callable is defined outside torch and its code cannot be read."""
    kind = type(function).__module__
    if kind in ("torch._ops", "torch._library.custom_ops"):
        return "aten" not in str(function)
    call = inspect.getattr_static(type(function), "__call__", None)
    read = any(isinstance(getattr(f, "__func__", f), FunctionType) for f in (function, call))
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    extension = callable(function) and not read and package not in ("", *UNREAD)
    return extension or kind.startswith("triton.") or isinstance(function, ModuleSpec)


def is_bare(module: nn.Module) -> bool:
    """Return whether a module has no parameters."""
    return next(module.parameters(), None) is None


def _local_values(function: Any) -> dict[str, Any]:
    """Return the values of a function's free variables and its default arguments."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    free = {
        name: cell.cell_contents
        for name, cell in cells
        if name != "__class__" and cell != CellType()
    }
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
    return {**dict(defaults), **(function.__kwdefaults__ or {}), **free}


def _called(
    module: nn.Module, local: Mapping[str, Any], known: Mapping[str, Any], path: str
) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (module, function) for every function that a path in a module's code may refer to."""
    first, *names = path.split(".")
    root = first or names.pop(0)
    spaces: list[Mapping[str, Any]] = [local, known, sys.modules] if first else [local]
    packages = accumulate((known.get("__package__") or "").split("."), "{}.{}".format)
    roots = [root, *(f"{package}.{root}" for package in packages)]
    reached = [(module, space[key]) for space in spaces for key in roots if key in space][:1]
    if first and not reached:
        reached = [(module, spec) for spec in map(_unimported, roots) if spec is not None]
    reached += [(module, module)] if names and not first else []  # the local may be self
    for name in names:
        reached = [
            (value if isinstance(value, nn.Module) else owner, attribute)
            for owner, value in reached
            for attribute in _attributes(value, name)
        ]
    for owner, value in reached:
        members = [*value.values()] if isinstance(value, dict) else value
        for member in members if isinstance(members, (list, tuple)) else [value]:
            if (called := _function(member)) is not None:
                yield owner, called


def _attributes(value: Any, name: str) -> list[Any]:
    """Return every attribute `name` of a value and its classes, without evaluating properties."""
    if isinstance(value, ModuleSpec):
        return [value]
    if isinstance(value, (ModuleType, type)):
        own = getattr(value, name, None)
        return [_unimported(f"{value.__name__}.{name}") if own is None else own]
    spaces = [getattr(value, "__dict__", {}), *map(vars, type(value).__mro__)]
    spaces += [dict(value.named_children())] if isinstance(value, nn.Module) else []
    return [space[name] for space in spaces if name in space]


def _function(value: Any) -> Any:
    """Return the function that runs when a value is called, or None."""
    if isinstance(value, MethodType) and isinstance(value.__self__, type(torch.autograd.Function)):
        value = value.__self__  # Function.apply
    value = value.func if isinstance(value, (partial, partialmethod, cached_property)) else value
    value = value.__func__ if isinstance(value, classmethod) else value
    if isinstance(value, nn.Module) and not is_bare(value):
        return None  # layers in `value` do not belong to the caller
    if isinstance(value, (type, nn.Module)):
        value = getattr(value, "forward", None)  # a type is a torch.autograd.Function
    return value if callable(value) or _is_opaque(value) else None


@cache
def _unimported(name: str) -> ModuleSpec | None:
    """Return the spec of a module that exists but has not been imported."""
    with suppress(ImportError, ValueError):
        known = name in sys.modules or name.partition(".")[0] in UNREAD
        return None if known else find_spec(name)
    return None


@cache
def _words(code: CodeType) -> list[str]:
    """Return the names, operators and ellipses in a function and its nested functions, in execution
    order.

    ":" stands for a slice of the second axis, and "::" for a slice of the third axis. Attributes
    are written as `global.attribute`, `.local.attribute` or, if the object is unknown,
    `..attribute`. Local variables assigned from such a path are written as the path.
    """
    words, slices, path, origin = list[str](), list[bool](), "", ""
    copies = dict[str, str]()
    calls = list[tuple[list[str], list[str]]]()  # words in arguments and in the function
    steps = [*dis.get_instructions(code)]
    for i, step in enumerate(steps):
        value, name = step.argval, step.opname
        if name in ("PUSH_NULL", "LOAD_METHOD") or "NULL" in step.argrepr:
            calls.append(([], []))  # a called function runs after its arguments
        current = calls[-1][0] if calls else words
        outer, path = path, ""
        if isinstance(value, CodeType) and re.match("<.*(comp|expr)>", value.co_name):
            calls.append(([], _words(value)))  # a comprehension runs after its iterable
        elif isinstance(value, CodeType):
            current += _words(value)
        elif step.opcode in (*dis.haslocal, *dis.hasfree):
            names = value if isinstance(value, tuple) else (value,)
            if "STORE" in name and outer:
                copies[names[0]] = outer
            if "LOAD" in name and value != ".0":  # the iterable of a comprehension
                current += [copies.get(local, f".{local}") for local in names]
                path = current[-1]
        elif step.opcode in dis.hasname:
            outer = origin if name == "IMPORT_FROM" else outer or "."
            path = f"{outer}.{value}" if outer else value
            if name in ("LOAD_GLOBAL", "IMPORT_NAME"):
                path = origin = value
            current += [] if "IMPORT" in name else [path]
        elif name in ("BUILD_TUPLE", "BINARY_SUBSCR") or step.argrepr == "[]":
            current += [":"] if slices[:2] == [False, True] else []
            current += ["::"] if slices == [False, False, True] else []
            slices = []
        elif name == "BINARY_OP":
            current.append(step.argrepr.rstrip("="))
        elif name == "BUILD_SLICE":
            slices.append([s.argval for s in steps[i - 2 : i]] != [None, None])
        elif name == "LOAD_CONST":  # constant indices are tuples; Python 3.14 puts slices in them
            parts = value if isinstance(value, tuple) else (value,)
            current += ["Ellipsis" for part in parts if part is Ellipsis]
            slices += [(p.start, p.stop) != (None, None) for p in parts if isinstance(p, slice)]
        elif name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") and calls:
            words += sum(calls.pop(), [])
    return words + sum(chain(*calls), [])
