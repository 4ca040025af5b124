"""The entries of a site's ledger, which are a hash chain, and their texts.

    hash_n = SHA-256("budgets" || hash_(n-1) || n || kind || data set || text)        hash_0 = 32 zero bytes

    opened     the budget of a name, when it is first charged
    charged    what a training may have spent, before its first step
    left       an update of a charged training, before its first byte leaves
    closed     a name whose ledger was lost: it allows nothing any more

An entry is never changed and never deleted. Texts are canonical JSON, floats by their 16 hexadecimal digits.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from atoll.client.policy.budgets.charge import Charge, Work
from atoll.ground.strict_json import (
    ManifestError,
    check_canonical,
    exact,
    fields_of,
    inexact,
    integer,
    items_of,
    one_of,
    read_object,
    refuse,
)
from atoll.protocol.privacy.composition import Steps
from atoll.protocol.privacy.guarantee import NoiseBy, Unit
from atoll.protocol.secure.transcript import digest
from atoll.protocol.value_type import value

GENESIS = bytes(32)
TEXT_MAX = 64 * 1024
STEPS_MAX = 10**12
"""Most steps of one charge."""
PARTS_MAX = 64
"""Most kinds of steps in one charge."""
NOISE_MIN, NOISE_MAX, RATE_MIN = 1e-3, 1e9, 1e-9
"""Ends of the noise multipliers and sampling rates that an account can compute with."""

_UNITS, _PARTIES = ("client", "example"), ("coordinator", "clients", "site")


@value
class Opened:
    """The budget of a name."""

    epsilon_max: float
    delta: float
    unit: Unit


@value
class Charged:
    """What a training may have spent of a budget, in the budget's unit.

    Attributes:
        at: seconds since the epoch.
        work: that is charged.
        charge: as the run's terms say; its steps count by `spent_by`.
    """

    at: float
    work: Work
    charge: Charge


@value
class Left:
    """An update that leaves.

    Attributes:
        at: seconds since the epoch.
        charged: number of the entry that its training was charged with.
        update: digest of its manifest.
    """

    at: float
    charged: int
    update: str


@value
class Closed:
    """The end of a name."""

    at: float


Content = Opened | Charged | Left | Closed
KINDS: dict[str, type[Content]] = {"opened": Opened, "charged": Charged, "left": Left, "closed": Closed}
_NAMES = {kind: name for name, kind in KINDS.items()}


@value
class Entry:
    """One entry of the ledger: its data set and its content."""

    data: str
    content: Content

    @property
    def kind(self) -> str:
        """Name of the kind of its content."""
        return _NAMES[type(self.content)]


def extended(before: bytes, number: int, entry: Entry) -> bytes:
    """Return the hash of a chain after one more entry, whose number is given."""
    parts = (str(number), entry.kind, entry.data, text_of(entry.content))
    return digest("budgets", before, *(part.encode() for part in parts))


def text_of(content: Content) -> str:
    """Return the content of an entry as a text, of which there is one form."""
    match content:
        case Opened(epsilon_max, delta, unit):
            document: dict[str, Any] = {"epsilon_max": exact(epsilon_max), "delta": exact(delta), "unit": unit}
        case Charged(at, work, charge):
            document = {
                "at": exact(at),
                "agent": work.agent,
                "coordinator": work.coordinator,
                "run": work.run,
                "round": work.round,
                "task": work.task,
                "unit": charge.unit,
                "noise_by": charge.noise_by,
                "content": charge.content,
                "steps": [[exact(part.noise_multiplier), exact(part.sample_rate), part.steps] for part in charge.steps],
            }
        case Left(at, charged, update):
            document = {"at": exact(at), "charged": charged, "update": update}
        case Closed(at):
            document = {"at": exact(at)}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def read_entry(kind: object, data: object, text: object) -> Entry:
    """Read the fields of a row.

    Raises:
        ManifestError: they are no entry.
    """
    if type(kind) is not str or type(data) is not str or type(text) is not str or kind not in KINDS:
        refuse("entry", kind, ", ".join(KINDS))
    at = f"entry {kind}"
    if not text.isascii():
        refuse(at, ascii(text[:80]), "canonical JSON, in ASCII")
    found = read_object(text.encode(), num_bytes_max=TEXT_MAX, what=at)
    content = _READERS[kind](found, at)
    check_canonical(text_of(content).encode(), text.encode())
    return Entry(data, content)


def _opened(found: dict[str, Any], at: str) -> Opened:
    fields_of(found, at, keys=frozenset(("epsilon_max", "delta", "unit")))
    one_of(found["unit"], f"{at}.unit", allowed=_UNITS)
    epsilon_max, delta = (inexact(found[name], f"{at}.{name}", low=0.0) for name in ("epsilon_max", "delta"))
    if delta >= 1.0:
        refuse(f"{at}.delta", delta, "below 1")
    return Opened(epsilon_max, delta, found["unit"])


def _charged(found: dict[str, Any], at: str) -> Charged:
    texts = ("agent", "coordinator", "run", "task", "content")
    fields_of(found, at, keys=frozenset(("at", "round", "unit", "noise_by", "steps", *texts)))
    for name in texts:
        if type(found[name]) is not str:
            refuse(f"{at}.{name}", found[name], "a text")
    one_of(found["unit"], f"{at}.unit", allowed=_UNITS)
    one_of(found["noise_by"], f"{at}.noise_by", allowed=_PARTIES)
    integer(found["round"], f"{at}.round", low=0, high=2**63 - 1)
    parts = [_part(each, f"{at}.steps") for each in items_of(found["steps"], f"{at}.steps", num_max=PARTS_MAX)]
    if not parts:
        refuse(f"{at}.steps", parts, "at least one")
    work = Work(found["agent"], found["coordinator"], found["run"], found["round"], found["task"])
    unit: Unit = found["unit"]
    noise_by: NoiseBy = found["noise_by"]
    moment = inexact(found["at"], f"{at}.at", low=-math.inf)
    return Charged(moment, work, Charge(unit, tuple(parts), noise_by, found["content"]))


def _part(found: object, at: str) -> Steps:
    fields = items_of(found, at, num_max=3)
    if len(fields) != 3:
        refuse(at, fields, "three values")
    z, rate = inexact(fields[0], at, low=0.0), inexact(fields[1], at, low=0.0)
    if not NOISE_MIN <= z <= NOISE_MAX:
        refuse(at, z, f"{NOISE_MIN:g} to {NOISE_MAX:g}")
    if not RATE_MIN <= rate <= 1.0:
        refuse(at, rate, f"{RATE_MIN:g} to 1")
    integer(fields[2], at, low=1, high=STEPS_MAX)
    return Steps(z, rate, fields[2])


def _left(found: dict[str, Any], at: str) -> Left:
    fields_of(found, at, keys=frozenset(("at", "charged", "update")))
    if type(found["update"]) is not str:
        refuse(f"{at}.update", found["update"], "a text")
    integer(found["charged"], f"{at}.charged", low=1, high=2**63 - 1)
    return Left(inexact(found["at"], f"{at}.at", low=-math.inf), found["charged"], found["update"])


def _closed(found: dict[str, Any], at: str) -> Closed:
    fields_of(found, at, keys=frozenset(("at",)))
    return Closed(inexact(found["at"], f"{at}.at", low=-math.inf))


_READERS: dict[str, Callable[[dict[str, Any], str], Content]] = {
    "opened": _opened,
    "charged": _charged,
    "left": _left,
    "closed": _closed,
}


def read_chain(rows: Iterable[tuple[object, ...]]) -> tuple[list[Entry], list[bytes], str]:
    """Read the rows of a ledger: number, kind, data set, text, hash.

    Returns:
        The entries before the first fault, their hashes, and the fault as a sentence; empty: there is none.
    """
    entries: list[Entry] = []
    hashes: list[bytes] = []
    before = GENESIS
    for index, (number, kind, data, text, hash_) in enumerate(rows, 1):
        try:
            entry = read_entry(kind, data, text)
        except ManifestError:
            return entries, hashes, f"entry {index} of its budgets is missing or has been changed"
        before = extended(before, index, entry)
        if number != index or before != hash_:
            return entries, hashes, f"entry {index} of its budgets is missing or has been changed"
        entries.append(entry)
        hashes.append(before)
    return entries, hashes, ""
