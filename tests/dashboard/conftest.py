"""Places to show: a run with an open round, a larger ended one, and simulations, one of them half-written."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.client.policy.decide import Kind, PolicyRequest
from atoll.client.policy.history import PolicyHistory
from atoll.client.site.peers import PeersFile
from atoll.protocol.audit.chain import Event, instant
from atoll.protocol.audit.files import AuditFiles, audit_folder
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.statistics.results import keep
from benchmarks.views import build
from tests.client.policy.budgets.test_gate import Site, private
from tests.client.policy.test_gate import spooled, version
from tests.server.views.test_history import IN_ROUND_4, write_history

HOSTILE = "<script>alert(1)</script>\u202eevil\0😀"


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the paths of two coordinators' state directories and a folder of simulations."""
    folder = tmp_path_factory.mktemp("places")
    with StateDirectory.open(folder / "state") as state:
        write_history(state, IN_ROUND_4)
    keep(folder / "state", 1, _statistics())
    keep(folder / "state", 2, _statistics() | {"number": 2})
    _log(audit_folder(folder / "state"), 300)
    build(folder / "large", 1_200, 130)
    simulate(folder / "results" / "one", 3)
    simulate(folder / "results" / "sweep" / "a<b&c", 1)
    (folder / "results" / "sweep" / "torn").mkdir()
    whole = (folder / "results" / "one" / "rounds.jsonl").read_text().splitlines()[0]
    (folder / "results" / "sweep" / "torn" / "rounds.jsonl").write_text(f"{whole}\nno json\n{whole}\n")
    write_agent(folder / "atoll-agent-north")
    return [str(folder / name) for name in ("state", "large", "results", "atoll-agent-north")]


def write_agent(folder: Path) -> None:
    """Write the state directory of a site whose budget is spent, with hostile requests and an update that waits."""
    folder.mkdir()
    site = Site(folder, epsilon=1.7, before="rounds_per_day = 2\n")
    for number in (1, 2):
        assert site.gate.admit(private(number), version()).is_allowed
    assert not site.gate.admit(private(3), version()).is_allowed
    spooled(folder)
    site.gate.close()
    asks = PolicyRequest(kind=Kind.EVALUATE, run_id=HOSTILE, task=HOSTILE, number=1, local="{}")
    with closing(PolicyHistory(folder)) as history:
        history.asked(asks, 1_777_896_000.0)
    with PeersFile(folder).changing() as change:
        change.peers = change.peers.trusting({"south": "ab" * 16}).distrusting("evil")


def _statistics() -> dict[str, Any]:
    """Return a kept result of statistics, with names and reasons from other machines."""
    counts = {"counts": {HOSTILE: 2, "1": 1}, "withheld": 1, "sites": 2}
    moments = dict.fromkeys(("missing", "infinite", "min", "max"), 0) | {"count": 3, "mean": 0.25, "variance": 4.0}
    part = {"examples": 3, "sites": 2, "labels": {"target": counts}, "features": {f"{HOSTILE}-age": moments}}
    return {
        **{"number": 1, "task": "task.py:task", "asked": ["a", HOSTILE], "answered": ["a"], "ended_at": 0.0},
        **{"refused": {HOSTILE: f"policy_refused: {HOSTILE}"}, "merged": {"train": part}, "sites": {HOSTILE: {}}},
        **{"not_merged": {}, "left_out": {"a": {"train.features.x": HOSTILE}}, "not_shown": {}},
    }


def _log(folder: Path, events: int) -> None:
    """Write a signed log of an hour each event, of which the actor is a hostile name."""
    now = [1_769_860_800.0]
    files = AuditFiles(folder, lambda: now[0], file_bytes=20_000)
    for number in range(events):
        now[0] += 3600
        event = Event(instant(now[0]), HOSTILE, "operator", "run.stop", f"run-{number}", HOSTILE)
        files.append([event], sign=number % 100 == 99)
    files.close()


def simulate(folder: Path, rounds: int, **more: Any) -> None:
    """Write what `atoll simulate` writes while it runs: the log of rounds, with more in each, and the settings."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text('name = "sim"\ntask = "task.py:task"\nrounds = 9\n')
    with (folder / "rounds.jsonl").open("w") as log:
        for number in range(1, rounds + 1):
            line = {
                **{"round": number, "version": number, "state": "committed", "why": "enough", "detail": HOSTILE},
                **dict.fromkeys(("opened_s", "round_s", "virtual_s", "real_s"), 0.5 * number),
                **dict.fromkeys(("invited", "reported"), 2),
                **dict.fromkeys(("late", "lost", "failed", "refused", "stragglers", "released"), 0),
                **{"counted": 2, "bytes_down": 10, "bytes_up": 10, "trainings": 2 * number},
                **{"train": {"loss": 1 / number}, "server": {"loss": float("nan")}, "clients": {}},
                **{"fates": {HOSTILE: "reported", "b": "failed"}, "steps": {HOSTILE: 2}},
                **{"train_values": {HOSTILE: {"loss": 0.5}}, "client_values": {}},
                **more,
            }
            log.write(json.dumps(line) + "\n")
        log.write('{"round": 99, "torn')
