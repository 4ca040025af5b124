"""Overrides of a settings dataclass, from TOML or from the text of a command line; all faults at once."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from atoll.ground.faults import Refused, faults_in

Settings = TypeVar("Settings")


class OverridesRefused(Refused):
    """The given values do not fit the settings; `faults` lists every one."""


def overridden(
    settings: Settings, section: str, overrides: Mapping[str, Any], hidden: Collection[str] = ()
) -> Settings:
    """Return a copy of the settings with other values, as from `--set local.lr=0.05`.

    Args:
        settings: a dataclass of plain values, which checks their ranges when it is constructed.
        section: the name before the dot, for the messages.
        overrides: values by field name, of the field's type or as text from a command line ("0.05", "none").
        hidden: fields that are set in another way.

    Raises:
        OverridesRefused: unknown keys, wrong types, values out of range; all faults at once.
    """
    hints = types_of(type(settings), hidden)
    changes: dict[str, Any] = {}
    faults: list[str] = []
    for key, given in overrides.items():
        if key not in hints:
            faults.append(f"{section}.{key}: unknown key, got {given!r} (known: {', '.join(hints)})")
            continue
        value = read_value(hints[key], given) if isinstance(given, str) else given
        if fits(hints[key], value):
            changes[key] = value
        else:
            faults.append(f"{section}.{key}: expected {words(hints[key])}, got {given!r}")
    changed = settings
    try:
        changed = replace(settings, **changes)  # type: ignore[type-var]
    except ValueError as error:
        faults += faults_in(error)
    if faults:
        raise OverridesRefused(*faults)
    return changed


def check_all(*checks: Callable[[], object]) -> None:
    """Run several checks, each of which may fail.

    Raises:
        OverridesRefused: a check failed; the error lists the faults of all checks.
    """
    faults: list[str] = []
    for check in checks:
        try:
            check()
        except OverridesRefused as error:
            faults += error.faults
    if faults:
        raise OverridesRefused(*faults)


def type_faults(settings: object, section: str, hidden: Collection[str] = ()) -> list[str]:
    """List the fields with a value of a wrong type."""
    return [
        f"{section}.{name}: expected {words(hint)}, got {getattr(settings, name)!r}"
        for name, hint in types_of(type(settings), hidden).items()
        if not fits(hint, getattr(settings, name))
    ]


def types_of(kind: type, hidden: Collection[str] = ()) -> dict[str, tuple[type, ...]]:
    """Return the allowed types of each field."""
    hints = _hints(kind)
    names = [field.name for field in fields(kind) if field.name not in hidden]
    return {name: get_args(hints[name]) or (hints[name],) for name in names}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def fits(hint: tuple[type, ...], value: object) -> bool:
    """Return whether the value has one of the types; an int is a float if float64 holds it, a bool is no int."""
    is_function = callable(value) and Callable in map(get_origin, hint)
    if type(value) is int and float in hint:
        return abs(value) <= sys.float_info.max
    return type(value) in hint or is_function


def words(hint: tuple[type, ...]) -> str:
    """Describe the types of a type hint in words."""
    return " or ".join("none" if kind is NoneType else kind.__name__ for kind in hint)


def read_value(hint: tuple[type, ...], text: str) -> object:
    """Parse a string of a command line into a value of the types; return the string itself if it is none."""
    if NoneType in hint and text.lower() == "none":
        return None
    if bool in hint:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return int(text) if int in hint else float(text) if float in hint else text
    except ValueError:
        return text
