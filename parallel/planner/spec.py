"""A model or a cluster in one line, `gpt3,layers=48`, or as a table of a TOML: a preset with values replaced."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

Kind = TypeVar("Kind")

PRESET = "preset"
"""The key of a table that names a preset."""


def parse(kind: type[Kind], presets: Mapping[str, Kind], text: str, *, what: str) -> Kind:
    """Parse a model or cluster from `[PRESET,]NAME=VALUE,...`.

    Args:
        kind: a frozen dataclass; fields without a default are required.
        presets: the presets, by name.
        text: numbers as 80e9 or 128, plain words, true and false.
        what: the name of the thing, for the faults.

    Raises:
        ValueError: values are wrong; the message lists every fault, one a line.
    """
    table: dict[str, Any] = {}
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in entry.partition("="))
        key = name if equals else PRESET
        if key in table:
            faults.append(f"{what}: {key} is given twice in {text!r}")
        table[key] = value if equals else name
    return read(kind, presets, table, what=what, faults=faults)


def read(
    kind: type[Kind], presets: Mapping[str, Kind], table: Mapping[str, Any], *, what: str, faults: Iterable[str] = ()
) -> Kind:
    """Construct a model or cluster from a table of values, or of strings; `faults` are those already known.

    Raises:
        ValueError: values are wrong; the message lists every fault, one a line.
    """
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    found, values = list(faults), {}
    named = next((name for name in presets if name == table.get(PRESET)), None)
    for key, given in table.items():
        if key == PRESET and given != named:
            found.append(f"{what}: {given!r} is not a preset ({', '.join(presets)}) and no name=value")
        elif key != PRESET and key not in hints:
            known = difflib.get_close_matches(key, hints, 1)
            guess = f"did you mean {known[0]}? " if known else ""
            found.append(f"{what}.{key}: unknown ({guess}known: {', '.join(hints)})")
        elif key != PRESET:
            values[key] = _value(hints[key], given) if isinstance(given, str) else _exact(hints[key], given)
    preset = None if named is None else presets[named]
    required = [field.name for field in fields(kind) if field.default is field.default_factory]  # type: ignore[arg-type]
    missing = [name for name in required if preset is None and name not in values]
    if missing and PRESET not in table and not found:
        found.append(f"{what}: {', '.join(missing)} must be given, or a preset ({', '.join(presets)})")
    if found:
        raise ValueError("\n".join(found))
    return kind(**values) if preset is None else replace(preset, **values)  # type: ignore[type-var]


def _value(types: tuple[type, ...], text: str) -> Any:
    """Parse a string as a value of one of the types; return an unfit string itself for the constructor to refuse."""
    if NoneType in types and text == "none":
        return None
    if bool in types:
        return {"true": True, "false": False}.get(text, text)
    try:
        number = float(text) if int in types or float in types else None
    except ValueError:
        return text
    return text if number is None else _exact(types, number)


def _exact(types: tuple[type, ...], value: Any) -> Any:
    """Return a whole number as an integer if an integer is expected: 1e3 is one."""
    if int in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
