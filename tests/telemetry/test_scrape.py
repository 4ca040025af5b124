"""The scrape of a real federation, held against its records, the list, the dashboard and the alerts."""

import json
import re
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.server.journal.holder import running_coordinator
from atoll.telemetry.instruments import INSTRUMENTS, Kind, Process
from tests.cli.federation import TINY, Federation, federation, start_run, wait_for
from tests.cli.invoking import refused, shown
from tests.debian import needs
from tests.telemetry.receiver import Receiver, receiver
from tests.telemetry.test_pipeline import samples
from tests.waiting import BOUND_S

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
ROUNDS = 4
PROMTOOL = needs("promtool")


def fetched(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=BOUND_S) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Scraped:
    """A federation whose run has ended, and one scrape of each of its processes."""

    it: Federation
    coordinator: str
    """The address of the coordinator's endpoint."""
    agent: str
    rows: list[dict[str, Any]]
    received: Receiver

    def values(self, name: str, address: str = "") -> list[tuple[dict[str, str], float]]:
        found = samples(fetched(address or self.coordinator))
        return [(labels, value) for metric, labels, value in found if metric == name]


def address_in(it: Federation, process: str) -> str:
    found = wait_for(lambda: re.search(r"metrics on http://(\S+)/metrics", it.log(process)))
    return str(found[1])


@pytest.fixture(scope="module", name="scraped")
def _scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    with receiver() as received, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.address)
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        patch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
        with federation(folder, "metrics=127.0.0.1:0") as it:
            running = address_in(it, "coordinator")
            it.processes["b"].kill()
            it.processes["b"].wait()
            process = running_coordinator(it.state)
            assert process is not None
            metrics = ("--coordinator", process.address, "--metrics", "127.0.0.1:0")
            it.start("b", "agent", f"{TINY}:task", "--site", "b", *metrics)
            agent = address_in(it, "b")
            start_run(it, "tiny", f"rounds={ROUNDS}", "round.cohort_size=2", "round.quorum=2")
            wait_for(lambda: it.run_state("tiny-1") == "finished")
            rows = shown("round", "list", "--run", "tiny-1", "--state", it.state)
            yield Scraped(it, running, agent, rows if isinstance(rows, list) else rows["rows"], received)


def test_rounds_and_fates_are_those_of_the_records(scraped: Scraped) -> None:
    of_run = {"atoll_run_id": "tiny-1"}
    rounds = {
        (labels["atoll_round_outcome"], labels["atoll_round_reason"]): value
        for labels, value in scraped.values("atoll_rounds_total")
    }
    assert rounds == Counter((row["phase"], row["reason"]) for row in scraped.rows)
    fates = {labels["atoll_invitation_fate"]: value for labels, value in scraped.values("atoll_invitations_total")}
    words = ("waiting", "joined", "reported", "failed", "refused", "lost", "released", "straggler", "late", "carried")
    recorded = Counter({word: sum(row.get(word, 0) for row in scraped.rows) for word in words})
    assert sum(fates.values()) == sum(row["invited"] for row in scraped.rows)
    assert fates["reported"] == recorded["reported"]
    assert scraped.values("atoll_round_number") == [(of_run, ROUNDS)]
    assert scraped.values("atoll_run_state") == [({**of_run, "atoll_run_state": "finished"}, 1)]
    assert scraped.values("atoll_client_registered") == [(of_run, 2)]
    assert scraped.values("atoll_round_last_commit_time_seconds")[0][1] == pytest.approx(scraped.rows[-1]["ended_at"])
    durations = scraped.values("atoll_round_duration_seconds_sum")[0][1]
    assert durations == pytest.approx(sum(row["ended_at"] - row["opened_at"] for row in scraped.rows), abs=1e-3)
    assert scraped.values("atoll_fold_duration_seconds_count") == [(of_run, ROUNDS)]
    (_, num_bytes), *_ = scraped.values("atoll_update_io_bytes_total")
    assert num_bytes >= sum(row["num_bytes"] for row in scraped.rows) > 0
    assert scraped.values("atoll_journal_commit_duration_seconds_count")[0][1] > ROUNDS


def test_metrics_of_the_model_are_the_newest_ones(scraped: Scraped) -> None:
    recorded = shown("run", "show", "tiny-1", "--state", scraped.it.state)["metrics"]
    newest: dict[tuple[str, str], float] = {}
    for version in sorted(recorded, key=int):
        for source, metrics in recorded[version].items():
            newest |= {(source, name): value for name, value in metrics.items() if isinstance(value, int | float)}
    assert newest
    found = {
        (labels["atoll_metric_source"], labels["atoll_metric_name"]): value
        for labels, value in scraped.values("atoll_metric_value")
    }
    assert found == pytest.approx(newest)


def test_an_agent_has_its_own_and_no_other_sees_a_client(scraped: Scraped) -> None:
    (of_run, number), *_ = scraped.values("atoll_agent_training_duration_seconds_count", scraped.agent)
    assert of_run == {"atoll_run_id": "tiny-1"}
    assert number == ROUNDS
    assert scraped.values("atoll_agent_spool_usage_bytes", scraped.agent) == [({}, 0)]
    allowed = sum(value for labels, value in scraped.values("atoll_agent_policy_decisions_total", scraped.agent))
    assert allowed >= 2 * ROUNDS  # each training, and each upload
    text = fetched(scraped.coordinator)
    assert not re.search(r'client_(name|id)=|site=|="(a|b)"', text)


def test_a_scrape_has_what_the_list_says_and_nothing_else(scraped: Scraped) -> None:
    for process, address in ((Process.COORDINATOR, scraped.coordinator), (Process.AGENT, scraped.agent)):
        found = list(samples(fetched(address)))
        listed = {each.in_prometheus: each for each in INSTRUMENTS if process in each.processes}
        for name, labels, _ in found:
            base = name if name in listed or name == "target_info" else re.sub(r"_(bucket|sum|count)$", "", name)
            if base != "target_info":
                known = {attribute.replace(".", "_") for attribute in listed[base].attributes}
                assert set(labels) - {"le"} == known, name
        shown_names = {name for name, *_ in found}
        lacking = {
            name
            for name, each in listed.items()
            if (f"{name}_count" if each.kind is Kind.HISTOGRAM else name) not in shown_names
        }
        without_ranks = {"atoll_rank_connected", "atoll_rank_io_bytes_total"}
        assert lacking <= without_ranks | {"atoll_agent_work"}


def test_otlp_has_the_same(scraped: Scraped) -> None:
    sent = scraped.received
    wait_for(lambda: sent.points.get("atoll.rounds"))
    services = {resource["service.name"] for resource in sent.resources}
    assert services == {"atoll.coordinator", "atoll.agent"}
    names = {each.name for each in INSTRUMENTS}
    assert set(sent.points) <= names
    wait_for(lambda: max(point.as_double or point.as_int for point in sent.points["atoll.rounds"]) == ROUNDS)
    wait_for(lambda: any(point.count == ROUNDS for point in sent.points["atoll.round.duration"]))


@PROMTOOL
def test_prometheus_accepts_every_name(scraped: Scraped) -> None:
    for address in (scraped.coordinator, scraped.agent):
        done = subprocess.run(["promtool", "check", "metrics"], input=fetched(address), capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------- the dashboard and the alerts


def queries() -> Iterator[str]:
    """Yield every query of the dashboard and of the alerts."""
    for panel in json.loads((OPERATIONS / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*")
    yield from alerts().values()


def alerts() -> dict[str, str]:
    import yaml

    groups = yaml.safe_load((OPERATIONS / "rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_every_query_names_what_a_scrape_has() -> None:
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    known = {
        f"{each.in_prometheus}{suffix}": {attribute.replace(".", "_") for attribute in each.attributes}
        for each in INSTRUMENTS
        for suffix in suffixes.get(each.kind, ("",))
    }
    labels_known = {"le", "instance", "job"}.union(*known.values())
    for query in queries():
        bare = re.sub(r"\b(by|on) \([^)]*\)|\{[^}]*\}", "", query)
        metrics = re.findall(r"\b(?:atoll|process|cpython)_[a-z_]+\b", bare)
        assert metrics or "up{" in query, query
        for name in metrics:
            assert name in known, f"{name} in {query}"
        for metric, selected in re.findall(r"(\w+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+)\s*[=!]~?", selected):
                assert label in known.get(metric, labels_known) | labels_known, f"{label} of {metric}"


EMPTY = ("atoll_rank_", "absent(")
"""What a healthy federation without ranks has no value for, beside the alerts."""


@needs("prometheus")
def test_a_real_prometheus_answers_every_query(scraped: Scraped, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jobs = {"atoll-coordinator": scraped.coordinator, "atoll-agent": scraped.agent}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(OPERATIONS / "rules.yml")],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in jobs.items()],
    }
    (tmp_path / "prometheus.json").write_text(json.dumps(configuration))
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.json'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
    ]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answered(query: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", query
        return list(found["data"]["result"])

    def has_two_points() -> bool:
        try:
            return bool(answered("sum(count_over_time(process_uptime_seconds[1m])) > 5"))
        except OSError:
            return False

    try:
        wait_for(has_two_points)
        conditions = set(alerts().values())
        for query in queries():
            if query in conditions or any(word in query for word in EMPTY):
                answered(query)  # a healthy federation fires none, but each is evaluated
            elif "atoll_agent_work" not in query:  # nothing is under way
                assert answered(query), query
        assert answered('ALERTS{alertstate="firing"}') == []
    finally:
        process.kill()
        process.wait()


@PROMTOOL
def test_every_alert_fires_and_ends_in_its_unit_test() -> None:
    import yaml

    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=OPERATIONS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((OPERATIONS / "rules_test.yml").read_text())["tests"]
    tried = [each for test in tests for each in test["alert_rule_test"]]
    assert {each["alertname"] for each in tried if each["exp_alerts"]} == set(alerts())
    for name in alerts():
        times = [int(each["eval_time"][:-1]) for each in tried if each["alertname"] == name and each["exp_alerts"]]
        after = [int(each["eval_time"][:-1]) for each in tried if each["alertname"] == name and not each["exp_alerts"]]
        assert max(after) > min(times), f"{name} is never seen to end"


@PROMTOOL
def test_the_examples_of_prometheus_are_valid() -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["check", "rules", "rules.yml"]):
        done = subprocess.run(["promtool", *arguments], cwd=OPERATIONS, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- mistakes


def test_an_address_that_is_taken_or_none_ends_before_anything_runs(tmp_path: Path) -> None:
    place = ("--state", tmp_path / "state", "--insecure", "--set", "coordinator.listen=127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (fault,) = refused("coordinator", *place, "--metrics", address)
        assert fault.startswith(f"metrics: cannot listen on {address}: Address already in use")
        agent = ("agent", f"{TINY}:task", "--site", "a", "--insecure", "--state", tmp_path / "agent")
        (fault,) = refused(*agent, "--metrics", address)
        assert fault.startswith(f"metrics: cannot listen on {address}")
    assert not (tmp_path / "state").exists()
    for address in ("9464", "host:99999", "0.0.0.0:9464"):
        assert refused("coordinator", *place, "--metrics", address)
        assert refused(*agent, "--metrics", address)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """The package is hidden by a finder of modules in a separate process."""
    program = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.startswith('opentelemetry'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from atoll.cli.main import run\n"
        "sys.argv = ['atoll', 'coordinator', '--state', 'st', '--insecure', '--metrics', '127.0.0.1:0']\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'atoll[telemetry]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "st").exists()
