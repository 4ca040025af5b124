"""Extensions: a user's own code in place of a built-in, named by an installed package's entry point or by a reference.

A package declares its extensions in groups of entry points, such as `atoll.rules`; a setting then takes the declared
name as it takes a built-in one. The names are read from the metadata of the packages, without an import of their code.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationInfo

from atoll.aggregation.entry_points import NAME, Declared, all_declared, declared
from atoll.protocol.reference import check_reference, resolve
from atoll.protocol.settings import ConfigError

AS_RECORDED: Mapping[str, Any] = MappingProxyType({"are_recorded": True})
"""Context of a validation in which names of packages are not looked up: the settings were accepted before, or are for
another machine. A package that has gone missing is a fault when its code is loaded."""


@dataclass(frozen=True, slots=True)
class ExtensionKind:
    """A kind of code that a user may have of one's own, such as a rule."""

    name: str
    """The noun, in the singular."""
    group: str
    """The group of entry points in which packages declare it."""
    setting: str
    """The setting that names one."""
    allowed: str
    """The right object in words, with its article."""
    form: str
    """The last part of a reference in the words of a fault: `object` or `function`; empty: references are refused,
    because the code exists on both sides of a connection, and nothing that is received is imported."""
    built_in: Collection[str]
    """The names of Atoll's own."""
    fits: Callable[[object], bool]
    """The check of an object that was loaded."""
    faults: Callable[[Any], Sequence[str]] = lambda found: ()
    """The check of such an object against its contract, for the list of all."""

    def check(self, name: str, info: ValidationInfo) -> str:
        """Return the value of the setting if it may stand there; as the validator of its field. Imports no user code.

        Raises:
            ValueError: it is no built-in name, no name of exactly one installed package, and no reference.
        """
        if is_recorded(info) and (name in self.built_in or NAME.fullmatch(name)):
            return name
        if fault := self._fault_of_name(name):
            raise ValueError(fault)
        return name

    def load(self, name: str) -> object:
        """Import the code that a name of a package or a reference stands for, and return the object.

        Raises:
            ConfigError: no installed package declares the name, or several do; it does not load, or is of another kind.
        """
        if self.form and _is_reference(name):
            if self.fits(found := resolve(name)):
                return found
            raise ConfigError([f"{name}: is a {type(found).__name__}; allowed: {self.allowed}"])
        if fault := self._fault_of_name(name):
            raise ConfigError([f"{self.setting}: got {name!r}: {fault}"])
        found, reason = _loaded(declared(self.group)[name][0], self)
        if reason:
            raise ConfigError([f"{self.setting}: got {name!r}: {reason}, or name another {self.name}"])
        return found

    def _fault_of_name(self, name: str) -> str:
        """Return the reason that a value cannot stand in the setting; empty: it can."""
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


def is_recorded(info: ValidationInfo) -> bool:
    """Return whether a validation is `AS_RECORDED`."""
    return bool((info.context or {}).get("are_recorded"))


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
    """The reason that no setting may name it; empty: it can be used."""


def listed(kinds: Sequence[ExtensionKind]) -> list[Listed]:
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


def _fault_of(each: Declared, kind: ExtensionKind | None) -> str:
    if kind is None:
        return ""
    if each.name in kind.built_in:
        return _of_collision(each, kind)
    if not NAME.fullmatch(each.name):
        return f"the name {each.name!r} is not allowed: 1 to 64 letters, digits, - and _"
    if len(alike := declared(each.group)[each.name]) > 1:
        return _of_several(alike, kind)
    found, reason = _loaded(each, kind)
    if reason or not (faults := kind.faults(found)):
        return reason
    return f"{each.place} breaks the contract of a {kind.name}: {'; '.join(faults)}: correct the package"


def _of_collision(each: Declared, kind: ExtensionKind) -> str:
    or_else = f", or name its {kind.name} by {each.place}" if kind.form else ""
    return (
        f"it is a built-in {kind.name}, and the package {each.whose} declares one of the same name; allowed: a name "
        f"that stands for one {kind.name}: uninstall the package{or_else}"
    )


def _of_several(found: Sequence[Declared], kind: ExtensionKind) -> str:
    places = " or ".join(each.place for each in found)
    or_else = f", or name the object itself, {places}" if kind.form else ""
    return (
        f"the packages {' and '.join(each.whose for each in found)} declare it; allowed: a name that one package "
        f"declares: uninstall the other{or_else}"
    )


def _loaded(each: Declared, kind: ExtensionKind) -> tuple[object, str]:
    """Return the object, and the reason that it cannot be used; empty: it can."""
    try:
        found = each.load()
    except (Exception, SystemExit) as error:  # code of the package runs here and may raise anything, or call sys.exit
        why = f"cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
    else:
        if kind.fits(found):
            return found, ""
        why = f"is of the type {type(found).__name__}"
    return None, f"{each.place} of the package {each.whose} {why}; allowed: {kind.allowed}: correct the package"
