"""Variants that are found by their file: a folder is the list, so that a new variant is one new
file.

A name is the file's, with dashes where the file has underscores; files whose names begin with an
underscore are no variants, but what variants share. Nothing is imported before it is asked for.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def variant_names(path: Iterable[str], *, folders_only: bool = False) -> tuple[str, ...]:
    """The variants in a package's folder, in alphabetical order.

    path: the package's `__path__`. folders_only: variants are folders there, and files are none.
    `base.py` is none. TypeError names a file that cannot be imported by its name.
    """
    found = [
        each for each in iter_modules(path) if each.name != "base" and not each.name.startswith("_")
    ]
    for each in found:
        if not each.name.isidentifier():
            right = re.sub(r"\W", "_", each.name)
            raise TypeError(
                f"{each.name!r} in {', '.join(path)} cannot be imported: name it {right!r}"
            )
    return tuple(
        sorted(each.name.replace("_", "-") for each in found if each.ispkg or not folders_only)
    )


def variant_module(package: str, name: str) -> ModuleType:
    """The variant's file, or folder, imported."""
    return import_module(f"{package}.{name.replace('-', '_')}")


def variant_classes(package: str, name: str, base: type[Any]) -> list[Any]:
    """The subclasses of `base` that are defined in the variant's file, but for those that begin
    with an underscore.
    """
    module = variant_module(package, name)
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, base)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("_")
    ]


def variant_class(package: str, name: str, base: type[Any]) -> Any:
    """The one of them; TypeError if there is not exactly one."""
    found = variant_classes(package, name, base)
    if len(found) != 1:
        raise TypeError(
            f"{variant_module(package, name).__file__} must define one {base.__name__}, not "
            f"{len(found)}"
        )
    return found[0]
