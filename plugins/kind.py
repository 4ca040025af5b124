"""The kinds of custom code: each has a group of entry points, a form of reference, and a contract that guards it.

A package declares its objects in groups of entry points, such as `atoll.rules`; a setting then takes the declared name
as it takes a built-in one. The names are read from the metadata of the packages, without an import of their code.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from atoll.plugins.entry_points import NAME, Declared, all_declared, declared
from atoll.plugins.guard import RAISED, told
from atoll.plugins.reference import ReferenceNotFound, check_reference, resolve

if TYPE_CHECKING:
    from pydantic import ValidationInfo

AS_RECORDED: Mapping[str, Any] = MappingProxyType({"are_recorded": True})
"""Context of a validation that does not look up names of packages: the settings were accepted before, or are for
another machine. A package that is missing by then is a fault when its code is loaded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of custom code, such as a rule."""

    name: str
    """The kind's noun in the singular, such as rule."""
    group: str
    """The group of entry points in which packages declare it."""
    setting: str
    """The setting whose value names an object of this kind."""
    allowed: str
    """The allowed object in words, with its article, for a message."""
    failed: Callable[[str], Exception]
    """The constructor of the error of unusable code, from its sentence."""
    form: str = ""
    """The last part of a reference in the words of a fault: `object` or `function`; empty: references are refused,
    because the code exists on both sides of a connection, and nothing that is received is imported."""
    built_in: Collection[str] = ()
    """The names of the built-in objects."""
    methods: Sequence[str] = ()
    """The methods of the object; empty: it is a function."""
    options: str = ""
    """The setting with the arguments of a class or function that makes the object; empty: nothing makes it."""
    contract: str = ""
    """The class that guards such an object, as `module:class`, imported when an object is loaded: settings are read
    without numpy. Empty: the calls are guarded where they are made."""
    faults: str = ""
    """The function that lists the breaches of the contract by an object of an entry point, as `module:function`."""

    def check(self, name: str, info: "ValidationInfo") -> str:
        """Check the value of the setting, and return it; used as the validator of its type. Imports no user code.

        Raises:
            ValueError: it is no built-in name, no name of exactly one installed package, and no reference.
        """
        is_recorded = bool((info.context or {}).get("are_recorded"))
        if is_recorded and (name in self.built_in or NAME.fullmatch(name)):
            return name
        if fault := self.fault_of_name(name):
            raise ValueError(fault)
        return name

    def is_object(self, found: object) -> bool:
        """Return whether an object is of the kind, and not a maker of such objects."""
        if not self.methods:
            return callable(found)
        return not isinstance(found, type) and all(callable(getattr(found, name, None)) for name in self.methods)

    def load(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Import the custom object of a name, and return it wrapped in the contract that checks its results.

        Args:
            name: the name that one package declares, or a reference.
            options: arguments by name, for a class or function that makes the object.

        Raises:
            Exception: `failed`, as `find`; or it refuses the options, or does not keep the contract.
        """
        found = self.find(name)
        try:
            made = self.made(found, options or {})
            return resolve_name(self.contract)(made) if self.contract else made
        except RAISED as error:
            raise self.failed(f"{self.setting}: {name}: {told(error)}") from error

    def find(self, name: str) -> Any:
        """Import the object of a package's name or a reference, and return it unguarded.

        Raises:
            Exception: `failed`; no package declares the name, or several do; it does not load, or is of another kind.
        """
        if self.form and _is_reference(name):
            found, reason = self._imported(lambda: resolve(name), f"{name}:")
        elif reason := self.fault_of_name(name):
            reason = f"{self.setting}: got {name!r}: {reason}"
        else:
            found, reason = self.of_package(declared(self.group)[name][0])
            reason = reason and f"{self.setting}: got {name!r}: {reason}, or name another {self.name}"
        if reason:
            raise self.failed(reason)
        return found

    def of_package(self, each: Declared) -> tuple[Any, str]:
        """Import a package's object; return it and the reason that it cannot be used, or empty."""
        found, reason = self._imported(each.load, f"{each.place} of the package {each.whose}")
        return found, reason and f"{reason}: correct the package"

    def _imported(self, load: Callable[[], Any], name: str) -> tuple[Any, str]:
        try:
            found = load()
            if self.is_object(found) or (self.options and callable(found)):
                return found, ""
            why = _named(found)
        except ReferenceNotFound as error:
            return None, str(error)
        except RAISED as error:
            why = f"cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        makers = f", or a class or function that makes one of `{self.options}`" if self.options else ""
        return None, f"{name} {why}; allowed: {self.allowed}{makers}"

    def made(self, found: Any, options: Mapping[str, Any]) -> Any:
        """Return the object found, or make one from the options if a class or function was found.

        Raises:
            ValueError: the object takes no options, or the class or function refuses these or makes no such object.
        """
        if self.is_object(found):
            if options:
                raise ValueError(f"{self.options}: it is an object and takes none; allowed: a class or a function")
            return found
        try:
            return self.checked(found(**options))
        except RAISED as error:
            raise ValueError(f"{self.options}: {told(error)}") from error

    def checked(self, found: Any) -> Any:
        """Check that an object is of the kind, and return it; raise ValueError if not."""
        if not self.is_object(found):
            raise ValueError(f"{_named(found)}; allowed: {self.allowed}")
        return found

    def fault_of_name(self, name: str) -> str:
        """Return the reason why a setting refuses a value; empty if it is allowed. Imports no user code."""
        found = declared(self.group).get(name, ())
        if name in self.built_in:
            return _of_collision(found[0], self) if found else ""
        if len(found) == 1 and NAME.fullmatch(name):
            return ""
        if found:
            return _of_several(found, self)
        if self.form and _is_reference(name):
            return ""
        known = [f'"{each}"' for each in self.built_in]
        known += [
            f'"{each[0].name}" ({each[0].whose})'
            for name, each in declared(self.group).items()
            if name not in self.built_in
        ]
        forms = [f"module:{self.form}", f"path/to/file.py:{self.form}"] if self.form else []
        return (
            f"allowed: {' | '.join([*known, *forms])}; a {self.name} of a package has its name once the package is "
            "installed on this machine: `atoll plugins` lists them"
        )


def _named(found: object) -> str:
    return f"is the class {found.__name__}" if isinstance(found, type) else f"is of the type {type(found).__name__}"


def _is_reference(name: str) -> bool:
    try:
        return bool(check_reference(name))
    except ValueError:
        return False


# ------------------------------------------------------------ the list of all


@dataclass(frozen=True, slots=True)
class Listed:
    """One installed extension, as `atoll plugins` shows it."""

    kind: str
    """The kind's name, or the unknown group."""
    name: str
    package: str
    version: str
    object: str
    fault: str
    """The reason why no setting may name it; empty if it can be used."""


def listed(kinds: Sequence[Kind]) -> list[Listed]:
    """Return all installed extensions, by kind and name, after an import of each."""
    by_group = {kind.group: kind for kind in kinds}
    found = []
    for each in sorted(all_declared(), key=lambda each: (each.group, each.name, each.package)):
        kind = by_group.get(each.group)
        name = kind.name if kind else each.group
        place, fault = (each.place, _fault_of(each, kind)) if each.group else ("", each.place)
        if not kind and each.group:
            fault = f"there is no group {each.group}; known: {', '.join(by_group)}"
        found.append(Listed(name, each.name, each.package, each.version, place, fault))
    return found


def _fault_of(each: Declared, kind: Kind | None) -> str:
    if kind is None:
        return ""
    if each.name in kind.built_in:
        return _of_collision(each, kind)
    if not NAME.fullmatch(each.name):
        return f"the name {each.name!r} is not allowed: 1 to 64 letters, digits, - and _"
    if len(alike := declared(each.group)[each.name]) > 1:
        return _of_several(alike, kind)
    found, reason = kind.of_package(each)
    if reason or not kind.faults or not (faults := resolve_name(kind.faults)(found)):
        return reason
    return f"{each.place} breaks the contract of a {kind.name}: {'; '.join(faults)}: correct the package"


def _of_collision(each: Declared, kind: Kind) -> str:
    or_else = f", or name its {kind.name} by {each.place}" if kind.form else ""
    return (
        f"it is a built-in {kind.name}, and the package {each.whose} declares one of the same name; allowed: a name "
        f"that stands for one {kind.name}: uninstall the package{or_else}"
    )


def _of_several(found: Sequence[Declared], kind: Kind) -> str:
    places = " or ".join(each.place for each in found)
    or_else = f", or name the object itself, {places}" if kind.form else ""
    return (
        f"the packages {' and '.join(each.whose for each in found)} declare it; allowed: a name that one package "
        f"declares: uninstall the other{or_else}"
    )
