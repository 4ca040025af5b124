"""The codecs of installed packages: their names on the wire, and those that this process has opened.

    ternary@1.2-3f9a1c02                  the declared name, the package's version, the digest of its source
    ternary@1.2-3f9a1c02:{"levels":4}     with options, as JSON with sorted keys

Both sides of a connection run the package's code, each its own copy. Equal names on the wire are equal copies: bytes of
another version are refused by name, and never decoded.

A name that comes over the wire opens nothing: `opened` finds only what this process has opened for its own settings
(`open_for`), or after the coordinator has admitted the name (`open_named`). A process has one copy of a package: it
goes on with the one that it has loaded, although another is installed meanwhile.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.aggregation.codecs.own_object import made
from atoll.aggregation.entry_points import NAME, Declared, declared, source_digest

if TYPE_CHECKING:
    from atoll.aggregation.codecs.own_codec import OwnCodec

GROUP = "atoll.codecs"

NAME_MAX = 256
"""Largest length of a name on the wire."""

_ON_WIRE = re.compile(r"(?P<family>(?P<name>[A-Za-z0-9_-]{1,64})@[A-Za-z0-9.+!_]{0,40}-[0-9a-f]{8})(:(?P<options>.*))?")

_OPENED: "dict[str, OwnCodec]" = {}  # by the name on the wire
_BY_SETTING: "dict[tuple[str, str], OwnCodec]" = {}  # by the declared name, and the options as JSON
_LOADED: dict[str, str] = {}  # the family that this process has loaded, by the place of its object


def is_installed(name: str) -> bool:
    """Return whether a name on the wire has the form of an installed package's codec, here or elsewhere."""
    return len(name) <= NAME_MAX and name.isascii() and name.isprintable() and _ON_WIRE.fullmatch(name) is not None


def families() -> tuple[str, ...]:
    """Return the names on the wire, without options, of the codecs that are installed here. Imports none of them."""
    return tuple(_families_by_name().values())


def other_version(family: str, of: frozenset[str]) -> str:
    """Return the name of another version of a codec among those of another process; empty: there is none."""
    name = family.partition("@")[0]
    return min((each for each in of if each != family and each.partition("@")[0] == name), default="")


def opened(name: str) -> "OwnCodec":
    """Return a codec that this process has opened.

    Raises:
        ValueError: it has not.
    """
    if (codec := _OPENED.get(name)) is None:
        raise ValueError(f"codec {name!r} is not open here")
    return codec


def name_for(setting: str, options: Mapping[str, Any]) -> str:
    """Return the name on the wire of the codec of a setting; while it is not open, the setting itself."""
    codec = _BY_SETTING.get((setting, _as_json(options)))
    return setting if codec is None else codec.name


def open_for(setting: str, options: Mapping[str, Any]) -> "OwnCodec":
    """Open the codec that a setting names.

    Args:
        setting: the name that one package declares.
        options: arguments by name, for a class or a function.

    Raises:
        ValueError: it does not load, refuses the options, or is no codec.
    """
    if (found := _BY_SETTING.get((setting, _as_json(options)))) is None:
        family, loaded = _load(_the(setting))
        found = _BY_SETTING.setdefault((setting, _as_json(options)), _open(family, loaded, options))
    return found


def open_named(name: str) -> "OwnCodec":
    """Open the codec of a name on the wire, which another process has chosen among `families`.

    Raises:
        ValueError: no package or another version of it is installed here, or as in `open_for`.
    """
    if (found := _OPENED.get(name)) is not None:
        return found
    match = _ON_WIRE.fullmatch(name)
    if match is None or not is_installed(name):
        raise ValueError(f"{name[:NAME_MAX]!r} is no name of a codec")
    each = _the(match["name"])
    here = _family_of(each)
    if here != match["family"]:
        raise ValueError(f"{match['family']} is asked for, and {here} is installed here: install the same version")
    options = json.loads(match["options"] or "{}")
    are_named = isinstance(options, dict)
    if not are_named or not all(isinstance(value, bool | int | float | str) for value in options.values()):
        raise ValueError(f"{name!r}: the options are no plain values by name")
    family, loaded = _load(each)
    return _open(family, loaded, options)


def _open(family: str, loaded: Any, options: Mapping[str, Any]) -> "OwnCodec":
    from atoll.aggregation.codecs.own_codec import OwnCodec  # with numpy, which names alone do without

    name = f"{family}:{_as_json(options)}" if options else family
    if len(name) > NAME_MAX:
        raise ValueError(f"{name}: has {len(name)} characters with its options; allowed: at most {NAME_MAX}")
    codec = made(loaded, options)
    return _OPENED.setdefault(name, OwnCodec.of(name, codec))


def _the(name: str) -> Declared:
    found = declared(GROUP).get(name, ())
    if len(found) != 1:
        few = "no installed package declares" if not found else f"{' and '.join(each.whose for each in found)} declare"
        raise ValueError(f"{few} a codec {name!r} here: install the package that the other side has, and no other one")
    return found[0]


def _load(each: Declared) -> tuple[str, object]:
    """Import a codec's package; return the codec's family, and the object of its entry point."""
    family = _family_of(each)
    if (loaded := _LOADED.setdefault(each.place, family)) != family:
        raise ValueError(f"{family} is installed, and this process has loaded {loaded}: start it again")
    try:
        return family, each.load()
    except (Exception, SystemExit) as error:  # as above
        raise ValueError(f"{each.whose}: {each.place} cannot be loaded: {type(error).__name__}: {error}") from error


def _family_of(each: Declared) -> str:
    version = re.sub(r"[^A-Za-z0-9.+!_]", "_", each.version)[:40]
    try:
        return f"{each.name}@{version}-{source_digest(each.place)[:8]}"
    except (ImportError, ValueError, AttributeError, OSError) as error:
        raise ValueError(f"{each.whose}: {each.place} cannot be found: {error}") from error


def _families_by_name() -> dict[str, str]:
    found = {}
    for name, alike in declared(GROUP).items():
        if len(alike) == 1 and NAME.fullmatch(name):
            try:
                found[name] = _family_of(alike[0])
            except ValueError:
                continue  # `atoll plugins` lists it with its fault
    return found


def _as_json(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"), allow_nan=False)
