"""Registries: everything of one kind, one module per entry, found by name.

A registry holds the modules of one package of Leeway, and what installed packages declare as entry points of
the same group:

    # in Leeway: leeway/corrections/methods/tis.py defines METHOD, and `tis` is its name
    # elsewhere: [project.entry-points."leeway.corrections"]
    #            theirs = "their_package.theirs:METHOD"

Listing the names imports nothing; an entry is imported when it is first asked for.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from leeway.errors import UsageError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Entries of type `kind` by name, in alphabetical order.

    `group`: entry-point group. `package`: the package whose modules are the built-in entries; a module's name
    is the entry's name, without a trailing underscore (`is_.py` holds `is`). `attribute`: what a module calls
    its entry. `what`: the kind in error messages, for example "correction".
    """

    def __init__(self, group: str, package: str, attribute: str, kind: type[T], what: str) -> None:
        self.group, self.package, self.attribute, self.kind, self.what = group, package, attribute, kind, what
        self._loaded: dict[str, T] = {}

    @cached_property
    def _builtin(self) -> dict[str, str]:
        """Name -> module."""
        path = import_module(self.package).__path__
        modules = (info.name for info in pkgutil.iter_modules(path) if not info.name.startswith("_"))
        return {name.removesuffix("_"): f"{self.package}.{name}" for name in modules}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            other = found.get(point.name)
            if point.name in self._builtin:
                raise UsageError(
                    f"{self.what} {point.name!r} of {_origin(point)} has the name of a built-in {self.what}: "
                    f"rename the entry point in group {self.group}"
                )
            if other is not None and other.value != point.value:
                raise UsageError(
                    f"{self.what} {point.name!r} is declared by both {_origin(other)} and {_origin(point)}: "
                    f"uninstall one of them"
                )
            found[point.name] = point
        return found

    @property
    def builtin(self) -> list[str]:
        """Names of the entries that are part of Leeway, in alphabetical order."""
        return sorted(self._builtin)

    def __getitem__(self, name: str) -> T:
        """Raises UsageError for an unknown name, and for an installed entry that cannot be loaded."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({**self._builtin, **self._installed}))

    def __len__(self) -> int:
        return len(self._builtin) + len(self._installed)

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._installed

    def unknown(self, name: str) -> str:
        """What is wrong with a name that is not registered, and which names are."""
        close = difflib.get_close_matches(name, list(self), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown {self.what} {name!r}; {hint}available: {', '.join(self)}"

    def _load(self, name: str) -> T:
        if name in self._builtin:
            entry = getattr(import_module(self._builtin[name]), self.attribute)
        elif name in self._installed:
            entry = self._load_installed(self._installed[name])
        else:
            raise UsageError(self.unknown(name))
        if not isinstance(entry, self.kind):
            wanted = f"{self.kind.__module__}.{self.kind.__qualname__}"
            raise UsageError(
                f"{self.what} {name!r}: expected an instance of {wanted}, got {type(entry).__name__}"
            )
        return entry

    def _load_installed(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as exc:
            raise UsageError(
                f"{self.what} {point.name!r} of {_origin(point)} cannot be loaded from {point.value}: "
                f"{type(exc).__name__}: {exc}"
            ) from exc


def _origin(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else point.value
