"""The task of a story of bad luck, and the judgement at its end: the run, its records and the logs of its processes."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from atoll.protocol.vocabulary import Phase, RoundId, RunState
from atoll.server.rounds.record import RoundRecord
from tests.federation.processes import Federation

TASK = """
import time
import numpy as np
from atoll import Trained

class Unlucky:
    sites = {sites}
    def initial(self, seed):
        return {{"w": np.zeros({size}, np.float32)}}
    def num_examples(self, site):
        return 10
    def train(self, parameters, instructions):
        time.sleep(0.5)
        return Trained({{"w": np.ones({size}, np.float32)}}, 10, {{"loss": (5.0, 10.0)}})
    def evaluate(self, parameters, *, split, site):
        return {{"mean": (float(parameters["w"][0]) * 10, 10)}}

task = Unlucky()
"""


def write_task(folder: Path, sites: Sequence[str], size: int) -> str:
    """Write the task of a story with `size` parameters; return its name."""
    (folder / "unlucky_task.py").write_text(TASK.format(sites=sites, size=size))
    return f"{folder / 'unlucky_task.py'}:task"


def faults_of(
    it: Federation,
    run: str,
    sites: Sequence[str],
    *,
    rounds: int,
    told: Mapping[str, str],
    undone: Iterable[RoundId] = (),
) -> Iterator[str]:
    """Yield what is wrong after the end of a story.

    Args:
        it: its processes.
        run: the run.
        sites: its sites.
        rounds: the versions that it must have.
        told: the pattern of a line of the coordinator's log, by the trouble that it tells.
        undone: rounds that a restored backup does not know.
    """
    row, records = it.history().run(run), it.history().rounds(run)
    if row.state is not RunState.FINISHED:
        yield f"the run is {row.state}: {row.cause}"
    versions = [record.version for record in records if record.phase is Phase.COMMITTED]
    if versions != list(range(1, rounds + 1)):
        yield f"versions {versions} are committed"
    yield from _lost_updates(records)
    rows = {(site, record.round_id): row for record in records for site, row in record.clients.items()}
    for site in sites:
        for number in map(int, re.findall(rf"the update of round (\d+) of {run} is accepted", it.log(site))):
            found = rows.get((site, RoundId(number)))
            if RoundId(number) not in undone and (found is None or found.digest is None):
                yield f"{site} was told that its update of round {number} is accepted; no record has it"
    log = it.log("coordinator")
    yield from (f"the log does not tell of {name}" for name, line in told.items() if not re.search(line, log))
    yield from (f"a traceback in the log of {name}" for name in ("coordinator", *sites) if "Traceback" in it.log(name))


def _lost_updates(records: Sequence[RoundRecord]) -> Iterator[str]:
    """Yield the accepted updates that are in no version without a reason, or in one that does not exist."""
    committed = {record.round_id for record in records if record.phase is Phase.COMMITTED}
    for record in records:
        for site, row in record.clients.items():
            if row.digest and not row.unused_because and row.used_in not in committed:
                yield f"the update of {site} of round {record.round_id} is in no version, and its record has no reason"


def report(begun: float, records: Sequence[RoundRecord], faults: Sequence[str], **more: object) -> int:
    """Print the faults of a story and its summary, a line of JSON; return the exit code.

    Args:
        begun: its begin on the monotonic clock [s].
        records: of its rounds.
        faults: what is wrong.
        more: further fields of the summary.
    """
    for fault in faults:
        print(f"WRONG: {fault}")
    summary = {
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "rounds": len(records),
        "versions": sum(record.phase is Phase.COMMITTED for record in records),
        **more,
        "abandoned": dict(Counter(str(record.abandon_reason) for record in records if record.abandon_reason)),
        "fates": dict(Counter(str(row.fate) for record in records for row in record.clients.values())),
        "faults": [*faults],
    }
    print(json.dumps(summary))
    return 1 if faults else 0
