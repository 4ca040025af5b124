"""The codecs of installed packages: their names on the wire, and the codecs that this process has opened.

    ternary@1.2-3f9a1c02                  the declared name, the package's version, the digest of its source
    ternary@1.2-3f9a1c02:{"levels":4}     with options, as JSON with sorted keys

Both sides of a connection run their copy of the package's code. Equal names on the wire are equal copies: bytes of
another version are refused by name, and never decoded.

A name that comes over the wire opens nothing: `opened` finds only codecs that this process has opened for its settings
(`open_for`), or after the coordinator has admitted the name (`open_named`). A process has one copy of a package: it
keeps the loaded copy even if another version is installed meanwhile.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from atoll.plugins.entry_points import NAME, Declared, declared, source_digest
from atoll.plugins.kind import Kind

if TYPE_CHECKING:
    from atoll.tensors.codecs.custom_codec import CustomCodec

CODEC = Kind(
    name="codec",
    group="atoll.codecs",
    setting="aggregation.codec",
    allowed="an object with the methods `num_bytes`, `encode` and `decode`",
    failed=ValueError,
    methods=("num_bytes", "encode", "decode"),
    options="aggregation.codec_options",
    faults="atoll.tensors.codecs.contract:faults_without_options",
)

NAME_MAX = 256
"""Largest length of a name on the wire."""

_ON_WIRE = re.compile(r"(?P<family>(?P<name>[A-Za-z0-9_-]{1,64})@[A-Za-z0-9.+!_]{0,40}-[0-9a-f]{8})(:(?P<options>.*))?")

_OPENED: "dict[str, CustomCodec]" = {}  # by the name on the wire
_BY_SETTING: "dict[tuple[str, str], CustomCodec]" = {}  # by the declared name, and the options as JSON
_LOADED: dict[str, str] = {}  # the family that this process has loaded, by the place of its object


def is_installed(name: str) -> bool:
    """Return whether a name on the wire has the form of an installed package's codec, here or elsewhere."""
    return len(name) <= NAME_MAX and name.isascii() and name.isprintable() and _ON_WIRE.fullmatch(name) is not None


def families() -> tuple[str, ...]:
    """Return the names on the wire, without options, of the codecs that are installed here, without importing them."""
    found = []
    for name, alike in declared(CODEC.group).items():
        if len(alike) == 1 and NAME.fullmatch(name):
            with suppress(ValueError):  # `atoll plugins` lists it with its fault
                found.append(_family_of(alike[0]))
    return tuple(found)


def other_version(family: str, of: frozenset[str]) -> str:
    """Return another version's name of a codec among the names of another process, or ""."""
    name = family.partition("@")[0]
    return min((each for each in of if each != family and each.partition("@")[0] == name), default="")


def opened(name: str) -> "CustomCodec":
    """Return the open codec of a name on the wire.

    Raises:
        ValueError: this process has not opened it.
    """
    if (codec := _OPENED.get(name)) is None:
        raise ValueError(f"codec {name!r} is not open here")
    return codec


def name_for(setting: str, options: Mapping[str, Any]) -> str:
    """Return the codec's name on the wire for a setting; until the codec is opened, the setting itself."""
    codec = _BY_SETTING.get((setting, _as_json(options)))
    return setting if codec is None else codec.name


def open_for(setting: str, options: Mapping[str, Any]) -> "CustomCodec":
    """Open the codec that a setting names.

    Args:
        setting: the name that one package declares.
        options: arguments by name, for a class or a function.

    Raises:
        ValueError: the codec does not load, refuses the options, or is no codec.
    """
    if (found := _BY_SETTING.get((setting, _as_json(options)))) is None:
        found = _BY_SETTING.setdefault((setting, _as_json(options)), _open(_the(setting), options))
    return found


def open_named(name: str) -> "CustomCodec":
    """Open the codec of a name on the wire, which another process has chosen among `families`.

    Raises:
        ValueError: no package or another version of it is installed here, or as in `open_for`.
    """
    if (found := _OPENED.get(name)) is not None:
        return found
    match = _ON_WIRE.fullmatch(name)
    if match is None or not is_installed(name):
        raise ValueError(f"{name[:NAME_MAX]!r} is not the name of a codec")
    each = _the(match["name"])
    here = _family_of(each)
    if here != match["family"]:
        raise ValueError(f"{match['family']} is required, and {here} is installed here: install the same version")
    options = json.loads(match["options"] or "{}")
    are_named = isinstance(options, dict)
    if not are_named or not all(isinstance(value, bool | int | float | str) for value in options.values()):
        raise ValueError(f"{name!r}: the options are not plain values by name")
    return _open(each, options)


def _open(each: Declared, options: Mapping[str, Any]) -> "CustomCodec":
    """Import a codec's package, and open the codec with the given options."""
    from atoll.tensors.codecs.custom_codec import CustomCodec  # with numpy, which names alone do without

    family = _family_of(each)
    if (loaded := _LOADED.setdefault(each.place, family)) != family:
        raise ValueError(f"{family} is installed, and this process has loaded {loaded}: start it again")
    found, reason = CODEC.of_package(each)
    if reason:
        raise ValueError(reason)
    name = f"{family}:{_as_json(options)}" if options else family
    if len(name) > NAME_MAX:
        raise ValueError(f"{name}: has {len(name)} characters with its options; allowed: at most {NAME_MAX}")
    return _OPENED.setdefault(name, CustomCodec(name, CODEC.made(found, options)))


def _the(name: str) -> Declared:
    found = declared(CODEC.group).get(name, ())
    if len(found) != 1:
        few = "no installed package declares" if not found else f"{' and '.join(each.whose for each in found)} declare"
        raise ValueError(f"{few} a codec {name!r} here: install the package that the other side has, and no other one")
    return found[0]


def _family_of(each: Declared) -> str:
    version = re.sub(r"[^A-Za-z0-9.+!_]", "_", each.version)[:40]
    try:
        return f"{each.name}@{version}-{source_digest(each.place)[:8]}"
    except (ImportError, ValueError, AttributeError, OSError) as error:
        raise ValueError(f"{each.whose}: {each.place} cannot be found: {error}") from error


def _as_json(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":"), allow_nan=False)
