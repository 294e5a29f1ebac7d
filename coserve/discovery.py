"""Variants that are found by their file: a folder is the list, so that a new variant is one new file.

A name is the file's, with dashes where the file has underscores. Nothing is imported before it is asked for.
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def variant_names(path: Iterable[str], *, shared: Iterable[str] = ()) -> tuple[str, ...]:
    """The variants in a package's folder, in alphabetical order.

    path: the package's `__path__`. shared: files in it that are no variants.
    """
    return tuple(sorted(each.name.replace("_", "-") for each in iter_modules(path) if each.name not in shared))


def variant_class(package: str, name: str, base: type[Any]) -> Any:
    """The one subclass of `base` that is defined in the variant's file; TypeError if there is not exactly one."""
    module = import_module(f"{package}.{name.replace('-', '_')}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, base) and each.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must define one {base.__name__}, not {len(found)}")
    return found[0]
