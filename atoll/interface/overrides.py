"""Settings of a call, as the overrides that the command line takes."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from atoll.protocol.settings import ConfigError, is_bare, quoted


def overrides_of(settings: Mapping[str, Any] | None) -> list[str]:
    """Return settings by their dotted keys as `key=value`; None: there are none.

    Raises:
        ConfigError: they are no table, or values are none that TOML has; the error lists all faults.
    """
    plain = plain_table(settings)
    faults = [
        f"set: {key}: got {value!r}; allowed: a number, a string, true, false, a list, a table of them"
        for key, value in plain.items()
        if not is_plain(value)
    ]
    if faults:
        raise ConfigError(faults)
    return [f"{key}={_toml(value)}" for key, value in plain.items()]


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return a training's settings as `key=value` strings by dotted keys; strings have no quotes.

    Raises:
        ConfigError: they are no table, or values are no number, string, bool or None; the error lists all faults.
    """
    settings = plain_table(settings)
    faults = [
        f"set: {key}: got {value!r}; allowed: a number, a string, true, false, None"
        for key, value in settings.items()
        if not isinstance(value, bool | int | float | str | Path | None)
    ]
    if faults:
        raise ConfigError(faults)
    words = {True: "true", False: "false", None: "none"}
    return [
        f"{key}={words[value] if value is None or isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]


def plain_table(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return settings by their dotted keys, with plain values; None: there are none.

    Raises:
        ConfigError: they are no table, or name a setting twice.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError([f'set: got {settings!r}; allowed: a dictionary, such as {{"local.lr": 0.1}}'])
    found: dict[str, Any] = {}
    for key, value in chain.from_iterable(_dotted(name, plain_of(given)) for name, given in settings.items()):
        if key in found:
            raise ConfigError([f"set: {key}: got {found[key]!r} and {value!r}; allowed: one of them"])
        found[key] = value
    return found


def _dotted(key: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return a table of settings, such as `"round"`, as its settings by dotted keys; any other value unchanged."""
    is_table = isinstance(value, Mapping) and len(value) > 0 and all(is_bare(name) for name in value)
    if not is_table or "." in str(key):
        return [(key, value)]
    return [(f"{key}.{name}", each) for name, each in value.items()]


def plain_of(value: Any) -> Any:
    """Return a value with numbers and arrays of numpy, paths and tuples in it as numbers, lists and strings."""
    if isinstance(value, Mapping):
        return {key: plain_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain_of(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def is_plain(value: Any) -> bool:
    """Return whether a value is one that TOML can hold."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str | Path)


def _toml(value: Any) -> str:
    """Return a value in TOML's notation on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quoted(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML, and refused where they are not allowed
    return str(value) if isinstance(value, int) else quoted(str(value))
