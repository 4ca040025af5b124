"""The JSON encoding of the machines' values, for the journal, the snapshots and the records. Pure.

The encoding is exact: floats (NaN and infinities included), tuples, enums and integer keys are restored unchanged. The
decoding is strict: a body with a missing or unknown key, or with a value of another type, is refused. A field with a
default may be added to a value without a new schema version; nothing else may change.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, SchemaSerializer

from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.vocabulary import ClientId
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.events import Event as EventOfMessages
from atoll.server.members.member import Member
from atoll.server.rounds.events import Event
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_rules import RunRules

Value = TypeVar("Value")

BEFORE: Mapping[str, Any] = {"retry_wait": 0.0, "failure_rest": 0.0, "approval_wait": 0.0}
"""Fields of the policy that were added after the first journals, with their earlier implied values."""

_PLACE = re.compile(r'"rank":(\d+)(?:,"ranks":\[([\d,]*)\])?\}\Z')
"""Pattern of the end of an update's encoded metadata. An earlier Atoll wrote no `ranks`."""

PLACE_CHARACTERS_MAX = 8192
"""Largest length that `_PLACE` matches [characters]: 1,024 parts at one of 64 ranks each take 3,072 characters."""

_CONFIG = ConfigDict(ser_json_inf_nan="constants", extra="forbid", strict=True)
_PAGE: TypeAdapter[dict[ClientId, Member]] = TypeAdapter(dict[ClientId, Member], config=_CONFIG)
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Event), *get_args(EventOfMessages))}
"""Kinds of events, of runs of rounds and of messages; shared kinds are the same."""


def encode_event(event: object) -> tuple[str, str]:
    """Return the kind and the body of an event, of a run of rounds or of messages."""
    return type(event).__name__, encode(event)


def decode_event(kind: str, body: str, *, where: str) -> Any:
    """Decode an event, of a run of rounds or of messages.

    Args:
        kind: the kind from `encode_event`.
        body: the body from `encode_event`.
        where: the place to name in an error, such as `run r, entry 7`.

    Raises:
        StoreCorrupted: the kind is unknown, or the body does not fit it.
    """
    if kind not in _EVENTS:
        raise StoreCorrupted(f"{where}: unknown kind {kind!r}; known: {', '.join(sorted(_EVENTS))}")
    return decode(_EVENTS[kind], body, where)


def encode_ledger(ledger: Ledger) -> str:
    """Encode a ledger as the body of a snapshot."""
    return encode(ledger)


def decode_ledger(body: str, *, where: str) -> Ledger:
    """Decode a ledger; raises the errors of `decode_event`."""
    return decode(Ledger, body, where)


def encode_ledger_without_members(ledger: Ledger) -> str:
    """Encode a ledger as the body of a snapshot whose members are on separate pages."""
    return encode(replace(ledger, membership=replace(ledger.membership, members={})))


def encode_page(members: Mapping[ClientId, Member], names: Iterable[ClientId]) -> str:
    """Encode a page of members; fields with their default values are omitted."""
    return _PAGE.dump_json({name: members[name] for name in names}, exclude_defaults=True).decode()


def decode_page(body: str, *, where: str) -> dict[ClientId, Member]:
    """Decode a page; raises the errors of `decode_event`."""
    try:
        return _PAGE.validate_json(body)
    except ValidationError as error:
        raise StoreCorrupted(f"{where}: not a page of members: {_first_fault(error, skipped=0)}") from error


def encode_record(record: RoundRecord) -> str:
    """Encode the record of a round."""
    return encode(record)


def decode_record(body: str, *, where: str) -> RoundRecord:
    """Decode a record; raises the errors of `decode_event`."""
    return decode(RoundRecord, body, where)


def encode_rules(rules: RunRules) -> str:
    """Encode the rules of a run, with which every reader can replay its journal."""
    return encode(rules)


def decode_rules(body: str, *, where: str) -> RunRules:
    """Decode rules, an earlier Atoll's with its behaviour; raises the errors of `decode_event`."""
    return decode(RunRules, as_of_then(body, "policy"), where)


def as_of_then(body: str, table: str) -> str:
    """Complete stored settings with an earlier Atoll's behaviour for policy fields that it did not have.

    A run keeps the rules with which it began, and the replay of its journal depends on them. `table` is the key of the
    policy. A body that is not a JSON object of this form is returned unchanged: its reader refuses it.
    """
    try:
        fields = json.loads(body)
        if not BEFORE.keys() <= fields[table].keys():
            fields[table] = {**BEFORE, **fields[table]}
            return json.dumps(fields)
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    return body


@dataclass(frozen=True, slots=True)
class StoredUpdateMeta:
    """Metadata of an accepted update: everything except its bytes."""

    manifest: bytes
    """The canonical manifest, in ASCII: its SHA-256 is the update's digest."""
    magnitudes: Mapping[str, float | int]
    """Largest |element| of each tensor."""
    squared_norms: Mapping[str, float]
    """Sum of the squared elements of each tensor."""
    rank: int = 0
    """Aggregation rank that has the bytes."""
    ranks: tuple[int, ...] = ()
    """The rank of each part, in order, if the parts are at several ranks."""

    def parts_at(self, rank: int) -> tuple[int, ...] | None:
        """Return the parts at a rank; None: the whole update is at one."""
        return tuple(part for part, of_part in enumerate(self.ranks) if of_part == rank) if self.ranks else None

    @property
    def steps(self) -> tuple[float, float]:
        """FedNova's normalizer and effective steps, as the manifest claims them."""
        from atoll.protocol.manifest import parse_update

        manifest = parse_update(self.manifest)
        return manifest.normalizer, manifest.effective_steps

    @property
    def norm(self) -> float:
        """The Euclidean norm of the whole update."""
        return math.sqrt(math.fsum(self.squared_norms.values()))


def encode_meta(meta: StoredUpdateMeta) -> str:
    """Encode the metadata of an update."""
    return encode(meta)


def decode_meta(body: str, *, where: str) -> StoredUpdateMeta:
    """Decode the metadata of an update; raises the errors of `decode_event`."""
    return decode(StoredUpdateMeta, body, where)


def lies_at(meta: str, rank: int) -> bool:
    """Return whether this rank has bytes of an update, reading only the last fields of its encoded metadata."""
    place = _PLACE.search(meta, max(0, len(meta) - PLACE_CHARACTERS_MAX))
    return place is not None and str(rank) in (place[2].split(",") if place[2] else [place[1]])


@cache
def _adapter(kind: Any) -> TypeAdapter[tuple[Any]]:
    """Return the adapter of a tuple of one value: pydantic accepts a config for a tuple, not for a bare dataclass."""
    one: Any = tuple[kind]
    return TypeAdapter(one, config=_CONFIG)


@cache
def _serializer(kind: Any) -> SchemaSerializer:
    """Return the adapter's serializer; calling it directly skips the check of ten options."""
    return _adapter(kind).serializer


def encode(value: Any) -> str:
    """Encode a dataclass as JSON.

    Raises:
        ValueError: the value cannot be encoded.
    """
    try:
        kind: Any = type(value)
        return _serializer(kind).to_json((value,))[1:-1].decode()
    except PydanticSerializationError as error:  # a lone surrogate, which no string from the wire contains
        raise ValueError(f"{type(value).__name__} cannot be encoded as JSON: {error}") from error


def decode(kind: type[Value], body: str, where: str) -> Value:
    """Decode a dataclass of this type; raises the errors of `decode_event`."""
    try:
        adapter = _adapter(cast(Any, kind))
        value: Value = adapter.validate_json(f"[{body}]", context=AS_RECORDED)[0]
        return value
    except ValidationError as error:
        raise StoreCorrupted(f"{where}: not a {kind.__name__}: {_first_fault(error, skipped=1)}") from error


def _first_fault(error: ValidationError, *, skipped: int) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"][skipped:])
    return f"{path}: {first['msg']}" if path else first["msg"]
