"""Each alert of docs/operations in a real federation that has its fault, and after it (`make alerts-test`).

A real Prometheus scrapes a coordinator, a rank and two agents each second, and evaluates the shipped expressions. Only
durations are shortened, here: `for`, and those of `SHORTER`.
"""

import json
import os
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.protocol.identity.names import Identity, Role, aggregator
from atoll.server.identity.authority import Authority
from atoll.server.identity.setup import AUTHORITY, identity_folder
from atoll.server.journal.holder import running_coordinator
from benchmarks.members import equip
from benchmarks.processes import free_address
from tests.cli.federation import Federation, wait_for
from tests.cli.invoking import invoke, shown
from tests.debian import missing
from tests.postgresql import WANTED, Server, programs
from tests.waiting import BOUND_S

if lacking := missing("prometheus"):
    pytest.skip(lacking, allow_module_level=True)

pytestmark = pytest.mark.timeout(1200)

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
RULES = yaml.safe_load((OPERATIONS / "rules.yml").read_text())
NAMES = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]

FOR = "2s"
SHORTER = {"AtollRunStalled": ("600 + 3 *", "5 + 3 *"), "AtollRoundsAbandoned": ("[1h]", "[60s]")}
"""Durations in expressions, and their replacements: without a commit, and in which rounds are abandoned."""

SITES = ("a", "b")
LIFE_S = 60.0
"""Lifetime of a certificate that is soon renewed [s]."""

WIDE = '''
from pathlib import Path
import numpy as np
from atoll.task.array_task import Trained

HERE = Path(__file__).parent


class Wide:
    """A task whose training fails while there is a file `broken`, and that has 25 metrics if there is a file `wide`."""

    sites = ("a", "b")

    def initial(self, seed):
        return {"w": np.zeros(4, np.float32)}

    def num_examples(self, site):
        return 10

    def train(self, parameters, instructions):
        if (HERE / "broken").exists():
            raise RuntimeError("a fault of the task")
        return Trained({"w": np.ones(4, np.float32)}, 10, {"loss": (1.0, 1.0)})

    def evaluate(self, parameters, *, split, site):
        return {f"metric_{n}": (1.0, 1.0) for n in range(25 if (HERE / "wide").exists() else 1)}


task = Wide()
'''


class Live(Federation):
    """A federation with a rank, whose processes have metrics, and the Prometheus that scrapes them."""

    def __init__(self, folder: Path, database: Server | None) -> None:
        super().__init__(folder)
        self.database = database
        self.task = folder / "task.py"
        self.task.write_text(WIDE)
        self.listen, self.prometheus = free_address(), free_address()
        self.metrics = {name: free_address() for name in ("coordinator", "rank", *SITES)}
        self.reserve = 2**20

    def begin(self, name: str) -> None:
        """Start a process, with its metrics; one that was there before has its state."""
        metrics = ("--metrics", self.metrics[name])
        if name == "coordinator":
            settings = [f"listen={self.listen}", "aggregators=1", "start_aggregators=false"]
            settings += [f"disk_free_min={self.reserve}", "lease=5"]
            settings += [] if self.database is None else [f"database={self.database.url('alerts')}"]
            given = (f"--set=coordinator.{each}" for each in settings)
            self.start(name, "coordinator", "--state", self.state, *given, *metrics)
            wait_for(lambda: running_coordinator(self.state))
        elif name == "rank":
            equip(self.state, self.folder / "rank", aggregator(0))
            where = ("--state", self.folder / "rank", "--coordinator", self.listen)
            self.start(name, "aggregator", "--set", "rank=0", "--set", "ranks=1", *where, *metrics)
        else:
            equip(self.state, self.folder / f"atoll-agent-{name}", Identity(Role.CLIENT, name))
            where = ("--coordinator", self.listen, "--set", "reconnect_max=1")
            self.start(name, "agent", f"{self.task}:task", "--site", name, *where, *metrics)

    def end(self, *names: str) -> None:
        """Kill processes."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait()

    def run(self, name: str, *overrides: str) -> str:
        """Begin a run; return its id."""
        short = ("round.cohort_size=2", "round.quorum=2", "round.retry_wait=2", "round.failure_rest=0.1")
        given = [part for each in (f"name={name}", *short, *overrides) for part in ("--set", each)]
        return str(shown("run", "start", f"{self.task}:task", "--state", self.state, *given)["run"])

    def ask(self, query: str) -> list[Any]:
        """Return Prometheus's answer to a query."""
        url = f"http://{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", query
        return list(found["data"]["result"])

    def fires(self, name: str) -> bool:
        """Return whether an alert fires."""
        return bool(self.ask(f'ALERTS{{alertname="{name}",alertstate="firing"}}'))

    def begin_prometheus(self) -> None:
        jobs = {"atoll-coordinator": ("coordinator",), "atoll-rank": ("rank",), "atoll-agent": SITES}
        scraped = [
            {"job_name": job, "static_configs": [{"targets": [self.metrics[name] for name in names]}]}
            for job, names in jobs.items()
        ]
        (self.folder / "rules.yml").write_text(json.dumps(shortened()))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.folder / "rules.yml")],
            "scrape_configs": scraped,
        }
        (self.folder / "prometheus.json").write_text(json.dumps(configuration))
        command = [
            "prometheus",
            f"--config.file={self.folder / 'prometheus.json'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.prometheus}",
        ]
        with (self.folder / "prometheus.log").open("wb") as log:
            self.processes["prometheus"] = subprocess.Popen(command, stdout=log, stderr=log)


def shortened() -> dict[str, Any]:
    """Return the shipped rules with the durations of the test."""
    found = json.loads(json.dumps(RULES))
    for group in found["groups"]:
        for rule in group["rules"]:
            before, after = SHORTER.get(rule["alert"], ("", ""))
            assert before in rule["expr"], f"{rule['alert']}: {before}"
            rule["expr"] = rule["expr"].replace(before, after) if before else rule["expr"]
            if "for" in rule:
                rule["for"] = FOR
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module", name="live")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A healthy federation, whose database is a PostgreSQL server where there is one."""
    with ExitStack() as stack:
        database = None
        if (here := programs()) is not None:
            database = Server(here)
            stack.callback(database.remove)
            database.start()
            database.sql("CREATE SCHEMA alerts")
        it = Live(tmp_path_factory.mktemp("alerts"), database)
        try:
            for name in ("coordinator", "rank", *SITES):
                it.begin(name)
            it.begin_prometheus()

            def is_whole() -> bool:
                try:
                    return bool(it.ask("sum(up) == 4 and sum(atoll_rank_connected) == 1"))
                except OSError:
                    return False

            wait_for(is_whole)
            yield it
        finally:
            for process in it.processes.values():
                process.kill()
                process.wait()


# ---------------------------------------------------------------- the faults


@contextmanager
def sites_away(it: Live) -> Iterator[None]:
    """A run that waits, as both sites are away: it has committed a round before."""
    run = it.run("stalled", "rounds=1000000", "pause=1")
    wait_for(lambda: it.ask(f'atoll_round_number{{atoll_run_id="{run}"}} > 2'))
    it.end(*SITES)
    yield
    for name in SITES:
        it.begin(name)
    stop = lambda: invoke("run", "stop", run, "--state", it.state)  # noqa: E731
    wait_for(lambda: not it.fires("AtollRunStalled"))  # while it runs: it commits again
    assert it.run_state(run) == "running"
    assert stop().exit_code == 0


@contextmanager
def failed_run(it: Live) -> Iterator[None]:
    """A run whose training fails at every site, until it has used up its retries; later it is resumed."""
    (it.folder / "broken").touch()
    run = it.run("broken", "rounds=2", "round.retry=3")
    wait_for(lambda: it.run_state(run) == "failed")
    yield
    (it.folder / "broken").unlink()
    assert invoke("run", "resume", run, "--state", it.state).exit_code == 0
    wait_for(lambda: it.run_state(run) == "finished")


@contextmanager
def killed_coordinator(it: Live) -> Iterator[None]:
    """A coordinator that was killed, and is started again."""
    it.end("coordinator")
    yield
    it.begin("coordinator")


@contextmanager
def database_away(it: Live) -> Iterator[None]:
    """A database server that has crashed, and is started again."""
    if it.database is None:
        pytest.skip(WANTED)
    it.database.crash()
    yield
    it.database.start()


@contextmanager
def full_disk(it: Live) -> Iterator[None]:
    """A disk with less than four times the reserve, by a large file; the reserve is near to what is free."""
    free = free_in(it.folder)
    margin = min(free // 8, 2**30)
    it.reserve = (free - margin) // 4
    it.end("coordinator")
    it.begin("coordinator")
    wait_for(lambda: it.ask(f"atoll_disk_reserve_bytes == {it.reserve}"))
    assert not it.fires("AtollDiskFull")
    with (it.folder / "large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * margin)
    yield
    (it.folder / "large").unlink()
    wait_for(lambda: not it.fires("AtollDiskFull"))
    it.reserve = 2**20
    it.end("coordinator")
    it.begin("coordinator")


def free_in(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def certificates_end(it: Live) -> Iterator[None]:
    """A site and a rank whose certificates end soon: each is renewed at two thirds of its life, and lasts longer."""
    place = identity_folder(it.state) / AUTHORITY
    it.end("a", "rank")
    brief = Authority.open(place, LIFE_S)
    brief.credential(Identity(Role.CLIENT, "a")).store(identity_folder(it.folder / "atoll-agent-a"))
    brief.credential(aggregator(0)).store(identity_folder(it.folder / "rank"))
    for name in ("a", "rank"):
        it.begin(name)
    names = ("atoll://client/a", "atoll://aggregator/0")
    for name in names:
        firing = f'ALERTS{{alertname="AtollCertificateEnds",alertstate="firing",atoll_identity_name="{name}"}}'
        wait_for(lambda: it.ask(firing))  # noqa: B023
    yield


@contextmanager
def killed_rank(it: Live) -> Iterator[None]:
    """An aggregation rank that was killed, and is started again."""
    it.end("rank")
    yield
    it.begin("rank")


@contextmanager
def many_metrics(it: Live) -> Iterator[None]:
    """A run with more metrics than have series; it is deleted."""
    (it.folder / "wide").touch()
    run = it.run("wide", "rounds=1")
    wait_for(lambda: it.run_state(run) == "finished")
    yield
    (it.folder / "wide").unlink()
    assert invoke("run", "delete", run, "--state", it.state, "--yes").exit_code == 0


FAULTS: dict[str, Callable[[Live], Any]] = {
    "AtollRunStalled": sites_away,
    "AtollRunFailed": failed_run,
    "AtollRoundsAbandoned": failed_run,
    "AtollNoCoordinator": killed_coordinator,
    "AtollJournalAway": database_away,
    "AtollDiskFull": full_disk,
    "AtollCertificateEnds": certificates_end,
    "AtollRankAway": killed_rank,
    "AtollAgentDisconnected": killed_coordinator,
    "AtollSeriesDropped": many_metrics,
}
"""The fault of each alert: a context that has it, and removes it at its end."""


def test_each_alert_has_a_fault() -> None:
    assert list(FAULTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_fires_while_its_fault_lasts_and_ends_after_it(live: Live, name: str) -> None:
    wait_for(lambda: not live.fires(name))  # of the test before
    time.sleep(3.0)
    assert not live.fires(name), "a healthy federation fires none"
    with FAULTS[name](live):
        wait_for(lambda: live.fires(name))
        (alert, *_) = live.ask(f'ALERTS{{alertname="{name}",alertstate="firing"}}')
        assert re.fullmatch("warning|critical", alert["metric"]["severity"])
    wait_for(lambda: not live.fires(name))
