"""The terms of a secure sum: what a session's members agree to add, in which encoding, and how few may open it.

Each invitation states them, within the publisher's signature; a member hashes what it accepts into its signed keys, so
members with different terms are in no session together. Their digest, without run, round, attempt, session and base,
is what a site approves.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Any

from atoll.ground.strict_json import (
    check_canonical,
    exact,
    fields_of,
    inexact,
    integer,
    items_of,
    one_of,
    read_object,
    refuse,
    sha256_hex,
)
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.session_size import (
    ATTEMPTS_MAX,
    BYTES_MAX,
    MEMBERS_MAX,
    MEMBERS_MIN,
    TEXT_MAX,
    TWO_THIRDS,
    threshold_of,
)
from atoll.protocol.secure.transcript import digest
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import Purpose

PROTOCOL = 1
_INT_MAX = 2**53
_METRICS_MAX, _SUMS_MAX, _NAME_MAX = 100, 10_000, 200


@value
class Terms:
    """What the members of one session agree to.

    Attributes:
        run: the run's id.
        round: the number of the round, of the evaluated version or of the request for statistics, by `purpose`.
        attempt: 1 to `ATTEMPTS_MAX`: another one has new keys and adds the same encoded values.
        session: number of the session in its round, from 0.
        purpose: what is added.
        base: the base version's number.
        model: digest of the base version's manifest; of statistics, of the task's name (`data_digest`).
        frozen: digest of the tensors that do not travel; empty: none.
        task, algorithm, local: as in the invitation.
        layout: digest of the tensors that travel and of the metrics, by `masked_layout.layout_digest`; of statistics,
            of the layout of their numbers (`question`).
        bits: of a word of the sum.
        clip_norm: largest norm of an update [its units].
        examples_max: examples with weight 1; 0: all updates have weight 1.
        ranges: digest of the exponents of the tensors' ranges, by `ranges_digest`.
        members_max: most members, for which the words do not overflow.
        threshold: rule of the least number that opens a sum: "two_thirds", or a number in decimal digits.
        privacy: terms of differential privacy, a text (`privacy_terms`); empty: none.
        receivers: aggregation ranks that get parts of the masked update.
        metrics: of the training, or of the evaluation, whose sums are added, by name, each with its number of sums.
    """

    run: str
    round: int
    attempt: int
    session: int
    purpose: Purpose
    base: int
    model: str
    frozen: str
    task: str
    algorithm: str
    local: str
    layout: str
    bits: int
    clip_norm: float
    examples_max: int
    ranges: str
    members_max: int
    threshold: str
    privacy: str
    receivers: tuple[int, ...]
    metrics: tuple[tuple[str, int], ...] = ()

    def canonical(self) -> bytes:
        """Return the terms as bytes, of which there is one form."""
        return _canonical({"protocol": PROTOCOL, **asdict(self), "clip_norm": exact(self.clip_norm)})

    @property
    def digest(self) -> bytes:
        """SHA-256 of the terms, in a member's signed keys."""
        return _digest_of(self)

    @property
    def approved(self) -> bytes:
        """SHA-256 of what is the same in all rounds of a run, which a site approves."""
        return digest("approved", replace(self, round=0, attempt=1, session=0, base=0, model="", ranges="").canonical())

    @property
    def of_sum(self) -> bytes:
        """SHA-256 of what is the same in all attempts at one sum: a site agrees to it, charges and encodes it once."""
        return digest("sum", replace(self, attempt=1, session=0).canonical())

    def threshold_of(self, members: int) -> int:
        """Return how many of n `members` open a sum."""
        return threshold_of(self.threshold, members)


@lru_cache(maxsize=64)
def _digest_of(terms: Terms) -> bytes:
    """Return the digest of terms: a coordinator asks for that of a session once for each member's keys."""
    return digest("terms", terms.canonical())


def ranges_digest(ranges: Iterable[int]) -> str:
    """Return SHA-256 of the exponents of ranges as canonical JSON, of the list as an invitation has it."""
    return hashlib.sha256(json.dumps([*ranges], separators=(",", ":")).encode()).hexdigest()


def data_digest(task: str) -> str:
    """Return SHA-256 of what stands for a site's data in the terms of its statistics: the name of its task.

    Options, seed and layout are no part of it: statistics of one task under other options are of the same data.
    """
    return digest("data", task.encode()).hex()


def read_terms(data: bytes) -> Terms:
    """Read the terms of an invitation.

    Raises:
        ManifestError: they have another form, or a value out of range; the text has its path.
    """
    keys = frozenset({"protocol", *(field.name for field in fields(Terms))})
    found = fields_of(read_object(data, num_bytes_max=BYTES_MAX, what="terms"), "terms", keys=keys)
    integer(found["protocol"], "terms.protocol", low=PROTOCOL, high=PROTOCOL)
    one_of(found["purpose"], "terms.purpose", allowed=("update", "evaluation", "statistics"))
    for name, low, high in (
        ("round", 0, _INT_MAX),
        ("attempt", 1, ATTEMPTS_MAX),
        ("session", 0, _INT_MAX),
        ("base", 0, _INT_MAX),
        ("examples_max", 0, 2**40),
        ("members_max", MEMBERS_MIN, MEMBERS_MAX),
    ):
        integer(found[name], f"terms.{name}", low=low, high=high)
    if found["bits"] not in (32, 64) or type(found["bits"]) is not int:
        refuse("terms.bits", found["bits"], "32 | 64")
    for name in ("run", "frozen", "task", "algorithm", "local", "privacy"):
        if type(found[name]) is not str or len(found[name]) > TEXT_MAX:
            refuse(f"terms.{name}", found[name], f"a string of at most {TEXT_MAX} characters")
    for name in ("model", "layout", "ranges"):
        sha256_hex(found[name], f"terms.{name}")
    _check_threshold(found["threshold"], found["members_max"])
    _check_privacy(found)
    receivers = items_of(found["receivers"], "terms.receivers", num_max=4096)
    ranks = [integer(rank, "terms.receivers", low=0, high=4095) for rank in receivers]
    if ranks != sorted({*ranks}):
        refuse("terms.receivers", ranks, "ranks in order, each once")
    clip_norm = inexact(found["clip_norm"], "terms.clip_norm", low=0.0)
    del found["protocol"]
    metrics = _metrics(found["metrics"])
    result = Terms(**{**found, "clip_norm": clip_norm, "receivers": tuple(ranks), "metrics": metrics})
    check_canonical(result.canonical(), data)
    return result


def _metrics(pairs: object) -> tuple[tuple[str, int], ...]:
    result = []
    for pair in items_of(pairs, "terms.metrics", num_max=_METRICS_MAX):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or not 0 < len(pair[0]) <= _NAME_MAX:
            refuse("terms.metrics", pair, "pairs of a name and a number of sums")
        result.append((pair[0], integer(pair[1], "terms.metrics", low=1, high=_SUMS_MAX)))
    if result != sorted({*result}) or len(dict(result)) < len(result):
        refuse("terms.metrics", result, "metrics in order, each once")
    return tuple(result)


def _check_threshold(rule: object, members_max: int) -> None:
    if rule == TWO_THIRDS:
        return
    is_count = type(rule) is str and rule.isascii() and rule.isdecimal() and len(rule) <= 2 and rule == str(int(rule))
    if not is_count or not 2 <= int(str(rule)) <= members_max:
        refuse("terms.threshold", rule, f"{TWO_THIRDS!r}, or a count from 2 to {members_max} as a string")


def _check_privacy(found: dict[str, Any]) -> None:
    """Check the privacy of terms, beside which nothing that depends on data is added."""
    privacy = read_privacy(found["privacy"])
    if privacy is None:
        return
    if found["purpose"] != "update" or found["metrics"] or found["examples_max"]:
        refuse("terms.privacy", "a guarantee", "no metrics, and equal weights, in a sum of updates")
    if privacy.sum_min > found["members_max"]:
        allowed = f"honest_min + colluders of at most members_max = {found['members_max']}"
        refuse("terms.privacy", f"{privacy.honest_min} + {privacy.colluders}", allowed)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
