"""Packages that import a name when it is first asked for (PEP 562): nobody waits for what they do not use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Steady(ModuleType):
    """A package in which a name means the same whatever was imported first.

    ``import treespec.tune`` ends with binding that *module* to ``treespec.tune``. Where the package promises a function
    by this name, the module's function of the same name is bound instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in self.__all__:
            value = getattr(value, name, value)  # treespec.policies is promised as a module
        super().__setattr__(name, value)


def lazy(package: str, where: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package; its submodules can be asked for as well.

    Args:
        package: its ``__name__``; it must have an ``__all__``.
        where: the module below the package that each name comes from.
    """
    here = sys.modules[package]
    here.__class__ = _Steady

    def get(name: str) -> Any:
        if name in where:
            found = getattr(importlib.import_module(f"{package}.{where[name]}"), name)
            return vars(here).setdefault(name, found)
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(here), *here.__all__})
