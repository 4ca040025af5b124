"""`atoll export otlp`: a trace for each round of a run, and the metrics of single sites, for a receiver of OTLP."""

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.exports.deployed import KINDS, is_settled
from atoll.cli.printing import note
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.views import read_pages, read_view
from atoll.protocol.paging import Paging
from atoll.protocol.vocabulary import TERMINAL

if TYPE_CHECKING:
    from atoll.telemetry.instruments import Attributes
    from atoll.telemetry.otlp import Cursors, Receiver

SITES_MAX = 1000
"""Largest number of sites whose metrics are sent."""

LOOK_S = 2.0
"""Wait of `--follow` after news, and before a receiver that is away is tried again [s]."""

LOOK_MAX_S = 60.0
"""Longest wait before another attempt [s]."""

Place = tuple[Path, str]
"""A state directory and the URL of its database."""


def export_otlp(run: str, to: str, place: Place, folder: Path, *, follow: bool, sites: bool) -> dict[str, Any]:
    """Send all rounds that have ended and that the receiver lacks; return the outcome in JSON types.

    Args:
        run: id or name of the run.
        to: the receiver's address; empty: OTEL_EXPORTER_OTLP_ENDPOINT.
        place: where the run is.
        folder: the folder of the cursor.
        follow: continue until the run has ended.
        sites: send the metrics of single sites, too.

    Raises:
        CommandError: a package or an address is missing, or the run has no rounds.
        TryAgain: the receiver does not take the export now.
    """
    _check_packages()
    from atoll.operations.admin import NoAnswer
    from atoll.operations.temporary import TryAgain
    from atoll.server.errors import DatabaseAway
    from atoll.telemetry.otlp import Cursors, Receiver, ReceiverAway, address_from

    address = to or address_from()
    if not re.match(r"https?://[^/\s]", address):
        fault = f"--to: got {address!r}; allowed: the address of a receiver of OTLP over HTTP, as http://127.0.0.1:4318"
        raise CommandError(f"{fault}; or set OTEL_EXPORTER_OTLP_ENDPOINT")
    seen = _run(run, place)
    cursors, receiver = Cursors(folder, seen["run"], address), Receiver(address, seen["run"])
    sent, wait = 0, LOOK_S
    try:
        while True:
            try:
                seen = _run(seen["run"], place)
                sent += _send(seen, place, receiver, cursors, sites=sites)
            except (ReceiverAway, NoAnswer, DatabaseAway) as error:
                if not follow:
                    raise TryAgain(f"{error}; the same command continues it") from error
                if wait == LOOK_S:
                    note(f"{error}; trying again")
                wait = min(2 * wait, LOOK_MAX_S)
            else:
                wait = LOOK_S
                if not follow or seen["state"] in TERMINAL:
                    break
            time.sleep(wait)
    finally:
        receiver.close()
    return {"run": seen["run"], "tool": "otlp", "place": address, "rows": sent, "state": seen["state"]}


def _check_packages() -> None:
    try:
        is_here = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_here = False
    if not is_here:
        fault = "otlp needs opentelemetry-exporter-otlp-proto-http, which is not installed"
        raise CommandError(f"TOOL: {fault}: pip install 'atoll[telemetry]'")


def _run(run: str, place: Place) -> Any:
    """Return the document of a run of rounds, with its number."""
    seen = read_view("run", *place, run=run)["document"]
    if seen.get("exchanges") is not None:
        raise CommandError(f"{seen['run']} is a run of messages, which has exchanges: only rounds have traces")
    if not seen.get("number"):
        what = "its number, from which the ids of spans follow, is in the coordinator's state directory"
        raise CommandError(f"{seen['run']}: {what}: name it with --state, or update the coordinator")
    return seen


def _send(seen: Any, place: Place, receiver: "Receiver", cursors: "Cursors", *, sites: bool) -> int:
    """Send what the receiver lacks; return the number of spans and points."""
    from atoll.telemetry.spans import spans_of

    sent, run_id = 0, seen["run"]
    rows = read_pages("rounds", *place, run=run_id, paging=Paging(after=str(cursors.now.round)))["rows"]
    for row in rows:
        if not is_settled(row, seen):
            break  # an older round is never behind the cursor
        record = read_view("round", *place, run=run_id, number=row["round"])
        spans = list(spans_of(run_id, seen["number"], record))
        receiver.send_spans(spans)
        cursors.now.round = row["round"]
        cursors.store()
        sent += len(spans)
    return sent + (_send_sites(seen, place, receiver, cursors) if sites else 0)


def _send_sites(seen: Any, place: Place, receiver: "Receiver", cursors: "Cursors") -> int:
    """Send the values of versions that no further site measures, by the policy of each site."""
    run_id = seen["run"]
    versions = {row["version"]: row["created_at"] for row in read_pages("versions", *place, run=run_id)["rows"]}
    views = read_view("sites", *place, run=run_id, paging=Paging(whole=True))
    names = sorted({site for kind in KINDS for site in views[kind]["curves"]})
    if len(names) > SITES_MAX:
        note(f"{run_id}: leaves out the metrics of {count_of(len(names) - SITES_MAX, 'site')}: at most {SITES_MAX}")
    newest, last = cursors.now.version, seen["version"] - (seen["state"] not in TERMINAL)
    points = sorted(_points(run_id, views, versions, set(names[:SITES_MAX])), key=lambda point: point[2])
    fresh = [(of, value, at) for of, value, at, version in points if newest < version <= last]
    receiver.send_points(fresh)
    if last > newest:
        cursors.now.version = last
        cursors.store()
    return len(fresh)


def _points(
    run_id: str, views: Any, versions: dict[int, float], sites: set[str]
) -> "Iterator[tuple[Attributes, float, float, int]]":
    """Yield each value of a site: its attributes, value, instant and version."""
    from atoll.telemetry.instruments import NAME, RUN, SOURCE

    for kind in KINDS:
        for site, curves in views[kind]["curves"].items():
            if site not in sites:
                continue
            for metric, curve in curves.items():
                of = {RUN: run_id, "atoll.client.name": site, NAME: metric, SOURCE: kind}
                for version, value in curve:
                    if isinstance(value, int | float) and version in versions:
                        yield of, value, versions[version], version
