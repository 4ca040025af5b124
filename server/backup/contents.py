"""The contents of a backup: the files of a state directory that belong to it, and the format of `backup.json`."""

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

FORMAT = 1

_IDENTITY = r"(?:identity|authority)/[ -~]+"
_VERSION = r"versions/\d{6,}(?:\.[a-z_]+)?\.(?:safetensors|manifest\.json)"
_UPDATE = r"updates/[0-9a-f]{64}(?:\.bin|\.\d{4}\.(?:bin|json))"
_CONTENT = r"contents/[0-9a-f]{64}\.(?:safetensors|manifest\.json)"
_IMMUTABLE = rf"runs/\w[\w.-]*/(?:{_VERSION}|{_UPDATE}|{_CONTENT})"
_RUNS = rf"{_IMMUTABLE}|runs/\w[\w.-]*/(?:ranks|worker\.log)"
_AUDIT = r"audit/(?:audit-\d+\.jsonl|cut-\d+\.bin|key\.pem|public\.pem)"
_STATISTICS, _SETS = r"statistics/\d{6,}\.json", r"statistics/secure\.json"
_RANK = r"(?:aggregators/\d+of\d+/)?"

_BELONGS = re.compile(
    rf"state\.db|alive|noise\.key|restored\.json|{_STATISTICS}|{_SETS}|{_AUDIT}|{_RANK}(?:rank\.json|address|{_IDENTITY}|{_RUNS})",
    re.A,
)
_IS_IMMUTABLE = re.compile(rf"{_RANK}{_IMMUTABLE}|{_STATISTICS}", re.A)
_IS_KEY = re.compile(rf"{_RANK}{_IDENTITY}|audit/key\.pem|noise\.key", re.A)

_DIGEST = "0" * 64
FOLDERS = (
    *("/key.pem", "/worker.log", "/r/worker.log", "/000000.json", "/000000.safetensors"),
    *(f"/{_DIGEST}.bin", f"/{_DIGEST}.safetensors", "/rank.json", "/0of1/rank.json"),
)
"""Ends of the paths of the coordinator's files, at least one for each of its folders."""


class BackupFailed(OSError):
    """Error: a backup cannot be made or used; the message has the reason."""


# ---------------------------------------------------------------- files of a state directory


def belongs(path: str) -> bool:
    """Return whether a path in a state directory belongs to a file of the coordinator.

    No other file is ever in a backup, in particular no other backup, which may contain the keys that this one excludes.
    """
    return _BELONGS.fullmatch(path) is not None


def is_immutable(path: str) -> bool:
    """Return whether the file at this path never changes: a version, an update, a message or statistics."""
    return _IS_IMMUTABLE.fullmatch(path) is not None


def is_key(path: str) -> bool:
    """Return whether the file at this path is a key or a certificate."""
    return _IS_KEY.fullmatch(path) is not None


# ---------------------------------------------------------------- backup.json


def _inside(path: str) -> str:
    """Check that a relative path cannot lead out of its folder, and return it."""
    if "\0" in path or {"", ".", ".."}.intersection(path.split("/")):
        raise ValueError("lies outside, or is not a path")
    return path


class Part(BaseModel):
    """File of a backup."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    path: Annotated[str, Field(max_length=1024), AfterValidator(_inside)]
    num_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    mode: Annotated[int, Field(ge=0, le=0o777)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _apart(parts: list[Part]) -> list[Part]:
    """Check that no path repeats or is a folder of another one, and return the parts."""
    paths = {part.path for part in parts}
    folders = {folder for path in paths for folder in _folders(path)}
    if len(paths) < len(parts) or paths & folders:
        raise ValueError("a path is there twice")
    return parts


def _folders(path: str) -> Iterable[str]:
    return accumulate(path.split("/")[:-1], "{}/{}".format)


class Contents(BaseModel):
    """Content of `backup.json`, the same for every Atoll that knows its format."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    format: int = FORMAT
    atoll: Annotated[str, Field(max_length=100)]
    """The version of Atoll that made the backup."""
    made_at: Annotated[float, Field(ge=0, le=1e11)]
    """The instant of the journal copy [s since the epoch]."""
    has_keys: bool
    files: Annotated[list[Part], AfterValidator(_apart)]
    database: Annotated[str, Field(max_length=4096)] = ""
    """Name of the server's database that held the journal; empty: it was a file."""

    def encoded(self) -> str:
        """Return the content of `backup.json`; fields that an earlier Atoll does not know are omitted if empty."""
        return self.model_dump_json(indent=1, exclude=None if self.database else {"database"})

    @property
    def num_bytes(self) -> int:
        """The size of all files [bytes]."""
        return sum(part.num_bytes for part in self.files)


class _AnyFormat(BaseModel):
    """Format number, the only field read from an unknown format."""

    format: Annotated[int, Field(strict=True, ge=0, le=10**6)]


def parse_contents(data: bytes) -> Contents:
    """Parse `backup.json`.

    Raises:
        BackupFailed: the file is damaged or of an unknown format; the message names the first fault.
    """
    try:
        if (found := _AnyFormat.model_validate_json(data).format) != FORMAT:
            raise BackupFailed(f"backup.json has format {found}, this Atoll knows {FORMAT}")
        return Contents.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        what = fault["msg"].removeprefix("Value error, ")
        raise BackupFailed(f"backup.json is damaged: {where + ': ' * bool(where)}{what}") from None
