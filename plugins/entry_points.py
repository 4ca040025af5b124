"""The entry points by which installed packages declare extensions of Atoll: names, packages, places of the objects.

Groups begin with `atoll.`, such as `atoll.codecs`. They are read from the packages' metadata; no code is imported.
"""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The form of a name that a setting may have."""

_PREFIX = "atoll."


@dataclass(frozen=True, slots=True)
class Declared:
    """An extension as a package declares it; its code is not imported."""

    group: str
    """The group of entry points; empty: the package's entry points cannot be read."""
    name: str
    package: str
    version: str
    place: str
    """The object, as `module:attribute`; of unreadable entry points the reason."""

    @property
    def whose(self) -> str:
        """The name and version of the package that declares the extension, for a message."""
        return f"{self.package} {self.version}".strip()

    def load(self) -> object:
        """Import the module of the extension, and return its object.

        Raises:
            Exception: any error of the package's code, or of the lookup in it.
        """
        return metadata.EntryPoint(self.name, self.place, self.group).load()


def declared(group: str) -> Mapping[str, Sequence[Declared]]:
    """Return the extensions of a group, sorted by name; several under one name collide."""
    found: dict[str, list[Declared]] = {}
    for each in sorted(all_declared(), key=lambda each: (each.name, each.package)):
        if each.group == group:
            found.setdefault(each.name, []).append(each)
    return found


def all_declared() -> tuple[Declared, ...]:
    """Return the extensions of all installed packages, in no order."""
    return _of_path(tuple((path, _changed_at(path or ".")) for path in sys.path))


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=4)  # reads the metadata of every installed package: 40 ms for a hundred
def _of_path(path: tuple[tuple[str, int], ...]) -> tuple[Declared, ...]:
    """Return the extensions of all packages on `sys.path`, whose folders the argument has with their times."""
    found: list[Declared] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        text = distribution.read_text("entry_points.txt")
        if text is None or _PREFIX not in text:
            continue
        package, version = _package_of(distribution)
        if package in seen or _is_shadowed(distribution, package):
            continue
        seen.add(package)
        found += _of_distribution(distribution, package, version)
    return tuple(found)


def _of_distribution(distribution: metadata.Distribution, package: str, version: str) -> Iterator[Declared]:
    try:
        points = [*distribution.entry_points]
        broken = next((point for point in points if not (point.name and point.value)), None)
        reason = f"{broken} is not an entry point" if broken else ""
    except Exception as error:  # the file is foreign, and may contain any text
        points, reason = [], f"{type(error).__name__}: {error}"
    if reason:
        yield Declared("", "", package, version, f"its entry_points.txt cannot be read: {reason}")
        return
    for point in points:
        if point.group.startswith(_PREFIX):
            yield Declared(point.group, point.name, package, version, point.value)


def _package_of(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return name and version; if the metadata cannot be read, the name of the folder."""
    try:
        return str(distribution.metadata["Name"] or "unnamed"), str(distribution.metadata["Version"] or "")
    except Exception:  # as above
        return str(getattr(distribution, "_path", "unnamed")), ""


def _is_shadowed(distribution: metadata.Distribution, package: str) -> bool:
    """Return whether a package of the same name lies on an earlier place of `sys.path`, and is imported instead."""
    try:
        first = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return first.locate_file("") != distribution.locate_file("")


# ------------------------------------------------------------ the source of a package


def source_digest(place: str) -> str:
    """Return the SHA-256 of the Python source that an object's package has now; compiled code does not count.

    The source are the `.py` files of the outermost regular package in which the object's module is, or that module
    alone, each with its path in the package and with ends of lines as on Unix. Imports no code of the package.

    Args:
        place: the object, as `module:attribute`.

    Raises:
        ImportError, ValueError: there is no such module.
        OSError: a file cannot be read.
    """
    spec = _outermost(place.partition(":")[0].strip())
    files = {Path(spec.origin).name: Path(spec.origin)} if spec.origin else {}
    for folder in map(Path, spec.submodule_search_locations or ()):
        files |= {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path.suffix == ".py" and path.is_file():
            content = hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).digest()
            digest.update(name.encode(errors="surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def _outermost(module: str) -> ModuleSpec:
    """Return the outermost regular package of a module: a namespace package has parts of several distributions."""
    outer, _, _ = module.rpartition(".")
    if outer and (spec := _outermost(outer)).origin is not None:
        return spec
    if (found := find_spec(module)) is None:
        raise ImportError(f"there is no module {module}")
    return found
