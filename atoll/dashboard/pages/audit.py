"""The page of an audit log with its proof: of a coordinator, or of the decisions of a site."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import Block, Cell, Facts, Field, Page, Sentences, TableBlock, cell, instant, shown
from atoll.ground.printable import count_of
from atoll.interface.audit import actor_in_words

Document = Mapping[str, Any]

FAULTS_MAX = 100

VERIFYING_S = 2
"""Seconds after which the page is read again while the log is verified for the first time."""


@dataclass(frozen=True)
class Proof:
    """The newest verdict on the whole log.

    Args:
        at: the instant of the verdict [s since the epoch]; None: the log is being verified for the first time.
        verdict: as `atoll audit verify --json`; None: there is none.
        sentence: it in words; or why the log cannot be verified.
    """

    at: float | None = None
    verdict: Document | None = None
    sentence: str = ""


def audit(
    place: int, label: str, page: str, document: Document, proof: Proof, asked: Mapping[str, str], *, count: int
) -> Page:
    """Return the page of a log, the newest event first.

    Args:
        place: the number of the place.
        label: its name.
        page: `audit`, or of a site `decisions`.
        document: the events and the newest checkpoint, as `atoll audit show --json`.
        proof: the newest verdict on the whole log.
        asked: the filters of this page, its cursor `before` and its `count`.
        count: the largest number of rows.
    """
    events = document["events"]
    filters = {name: value for name, value in asked.items() if name != "before"}
    links = [("Newest", addresses.of_place(place, page, **filters))] if asked.get("before") else []
    if len(events) == count and (first := events[0]["seq"]):
        links.append(("Older", addresses.of_place(place, page, **filters, before=first)))
    blocks: list[Block] = [Facts("Proof", [*_proof(document, proof)])]
    if proof.verdict is not None and proof.verdict["faults"]:
        faults = [*map(shown, proof.verdict["faults"][:FAULTS_MAX])]
        more = proof.verdict["num_faults"] - len(faults)
        note = f"{count_of(more, 'fault')} more" if more > 0 else ""
        blocks.append(Sentences("Faults", faults, note=note))
    blocks.append(
        TableBlock(
            "Events",
            ("line", "time", "actor", "role", "action", "object", "outcome", "digests"),
            [_row(event) for event in reversed(events)],
            "" if len(events) < count else f"{count_of(len(events), 'event')}; older ones follow",
            "no such event" if asked else "nothing is in the log yet",
            links,
            [
                Field("action", "action", asked.get("action", "")),
                Field("actor", "actor", asked.get("actor", "")),
            ],
        )
    )
    title = "Decisions" if page == "decisions" else "Audit"
    tabs = addresses.tabs_of_agent(place) if page == "decisions" else addresses.tabs_of_coordinator(place)
    every = VERIFYING_S if proof.at is None and not proof.sentence else 0
    return Page(title, blocks, addresses.trail(place, label), tabs, every=every)


def _proof(document: Document, proof: Proof) -> Iterator[tuple[str, Cell]]:
    found = proof.verdict
    if found is None:
        yield "chain", cell(proof.sentence or "the log is being verified", mark="" if not proof.sentence else "failed")
    else:
        is_faulty = bool(found["num_faults"])
        yield "chain", cell(proof.sentence, mark="failed" if is_faulty else "finished")
        yield "verified at", instant(proof.at)
        yield "lines verified", cell("none" if found["first"] is None else f"{found['first']} to {found['last']}")
        yield "not signed yet", cell(count_of(found["unsigned"], "event at the end", "events at the end"))
        yield "signed by", cell(found["key"])
        yield "newest signature", cell(found["checkpoint_time"])
        if found["relies_on"]:
            yield "relies on the archive that ends with", cell(found["relies_on"])
    yield "newest checkpoint", cell(document["checkpoint"])


def _row(event: Document) -> list[Cell]:
    digests = ", ".join(f"{name} {value}" for name, value in event["digests"].items())
    rest = (cell(event[name]) for name in ("role", "action", "object", "outcome"))
    return [cell(event["seq"]), cell(event["time"]), cell(actor_in_words(event)), *rest, cell(digests)]
