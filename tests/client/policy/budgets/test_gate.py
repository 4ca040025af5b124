"""The gate with budgets: what it charges, refuses, records and lets leave."""

import errno
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.client.policy.budgets.site_budgets import budgets_of
from atoll.client.policy.config import DataBudget
from atoll.client.policy.decide import Outcome, Rule
from atoll.client.policy.file import PolicyFile
from atoll.client.policy.gate import Gate
from atoll.client.session.events import EvaluationRequest, Invitation
from atoll.protocol.disclosure import MetricsLeave
from atoll.protocol.privacy import composition, loss_distribution
from atoll.protocol.privacy.composition import epsilon_bound, epsilon_of
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import Digest, Version
from tests.client.policy.budgets.test_terms import CLIENT, EXAMPLE
from tests.client.policy.test_gate import RUN, invitation, spooled, survey, version, written
from tests.server.sessions.small_federation import privacy_of, terms_of

POLICY = 'tasks = ["*"]\nruns = ["*"]\nmetrics = "per_site"\nstatistics = "merged"\nactions = ["*"]\n'
DATA = '[[privacy.data]]\nname = "mri-2026"\ntasks = ["t"]\nepsilon_max = {epsilon}\ndelta = 1e-6\nunit = "{unit}"\n'


class Site:
    """A gate with a budget for the task `t`."""

    def __init__(self, folder: Path, epsilon: float = 8.0, unit: str = "client", before: str = "") -> None:
        self.folder, self.path = folder, folder / "policy.toml"
        self.path.write_text(POLICY + before + DATA.format(epsilon=epsilon, unit=unit))
        self.start()

    def start(self) -> None:
        self.gate = Gate(self.path, self.folder, lambda: 1_777_896_000.0, coordinator="north:7070", noise="n")

    def restart(self) -> None:
        self.gate.close()
        self.start()

    def lines(self, action: str) -> list[str]:
        return [line["outcome"] for line in written(self.folder) if line["action"] == action]


def private(number: int = 1, terms: dict[str, Any] = CLIENT, **fields: Any) -> Invitation:
    local = json.dumps(terms | fields.pop("local", {}))
    return invitation(number, local=local, **fields)


def test_a_training_is_charged_when_it_is_admitted_and_the_site_s_log_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.gate.ask(private()).is_allowed
    assert site.lines("privacy.charge") == [], "the first look spends nothing"
    for _ in range(2):
        assert site.gate.admit(private(), version()).is_allowed
        site.restart()
    (line,) = site.lines("privacy.charge")
    assert line == (
        "charged to mri-2026: 1 step with a guarantee for one client, noise by the coordinator, which is trusted to "
        "add it; spent now epsilon 1.0607 of 8 at delta 1e-06 for one client"
    )


def test_an_account_that_was_found_ahead_is_not_found_again_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account of sampled steps takes a second and more of a processor, in which no heartbeat would leave."""
    computed: list[list[tuple[float, float, int]]] = []

    def found(kinds: list[tuple[float, float, int]], delta: float, about: float) -> float:
        computed.append(kinds)
        return 0.99 * about

    monkeypatch.setattr(loss_distribution, "epsilon_of_kinds", found)
    bound = epsilon_bound({(1.1, 0.01): 300}, 1e-6)
    site = Site(tmp_path, epsilon=0.995 * bound, unit="example")

    def sampled(number: int) -> Invitation:
        return private(number, EXAMPLE, local={"epochs": 1})

    composition._tight.cache_clear()
    for number in (1, 2, 3):
        before = len(computed)
        assert site.gate.ask(sampled(number)).is_allowed
        assert len(computed) == before, "the round before has found what decides"
        for kinds, delta in site.gate.accounts_ahead(sampled(number)):
            epsilon_of(kinds, delta)
        before = len(computed)
        assert site.gate.admit(sampled(number), version()).is_allowed
        assert len(computed) == before
    assert len(site.lines("privacy.charge")) == 3
    assert site.gate.ask(sampled(4)).rule is Rule.BUDGET
    assert len(computed) == 4
    composition._tight.cache_clear()


def test_requests_that_are_refused_need_no_account_ahead(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.gate.accounts_ahead(invitation()) == []
    assert site.gate.accounts_ahead(private(terms=EXAMPLE, local={"epochs": 1})) == [], (
        "it bounds nothing for all of a site's data"
    )
    assert site.gate.accounts_ahead(invitation(task="u")) == []


def test_another_training_of_the_round_after_an_update_has_left_is_charged_again(tmp_path: Path) -> None:
    site, entry = Site(tmp_path), spooled(tmp_path)
    assert site.gate.ask_upload(entry).rule is Rule.BUDGET, "it was not charged"
    site.gate.admit(private(), version())
    for _ in range(2):
        assert site.gate.ask_upload(entry).is_allowed
        site.restart()
    assert len(site.lines("privacy.charge")) == 1
    site.gate.admit(private(), version())
    assert len(site.lines("privacy.charge")) == 2


def test_work_whose_fresh_bytes_were_lost_is_charged_again_as_its_noise_is_another(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for charges in (1, 2):
        for _ in range(2):
            assert site.gate.ask(private()).is_allowed
            assert site.gate.admit(private(), version()).is_allowed
            assert len(site.lines("privacy.charge")) == charges
        [lost] = (tmp_path / "fresh").iterdir()
        lost.unlink()


def test_what_is_not_accounted_is_refused_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for request, why in (
        (invitation(), "a training without differential privacy (no [privacy] of the run)"),
        (private(message="query.sum"), "a message of a server program"),
        (EvaluationRequest(RUN, Version(1), "t", invitation().model_digest, 60.0), "an evaluation by its clients"),
        (replace(survey(), local="{}"), "statistics, which have no noise"),
        (private(algorithm="scaffold"), "a training with algorithm 'scaffold'"),
        (private(local={"privacy.noise_multiplier": 0}), "a training with 0 as privacy.noise_multiplier"),
        (private(local={"privacy.clip_norm": 1e300}), "a training with 1e+300 as privacy.clip_norm"),
        (private(terms=EXAMPLE, local={"epochs": 1}), "bounds nothing for all of a site's data"),
    ):
        decision = site.gate.ask(request)
        assert (decision.outcome, decision.rule) == (Outcome.REFUSED, Rule.BUDGET), why
        assert why in decision.detail
        assert any(why in line for line in site.lines(f"{_kind(request)}.refused"))
    assert site.gate.ask(invitation(task="u")).is_allowed, "other data has no budget"
    assert site.lines("privacy.charge") == []


def test_each_masked_update_of_a_private_sum_is_charged(tmp_path: Path) -> None:
    """What the sum's terms say is charged, and as much again for another attempt, which has other noise."""
    site = Site(tmp_path)
    of_sum = invitation(1, local="{}", secure=terms_of(privacy=privacy_of(noise_multiplier=4.0).text()))
    assert site.gate.admit(of_sum, version()).is_allowed
    (line,) = site.lines("privacy.charge")
    assert line.startswith(
        "charged to mri-2026: 1 step with a guarantee for one client, noise by the clients; spent now"
    )
    for name, charges in (("1", 1), ("1", 1), ("2", 2)):
        (folder := tmp_path / f"attempt{name}").mkdir(exist_ok=True)
        assert site.gate.ask_upload(spooled(folder, work=float(name))).is_allowed
        assert len(site.lines("privacy.charge")) == charges
    plain = invitation(2, local="{}", secure=terms_of())
    assert "without differential privacy" in site.gate.ask(plain).detail
    assert "in a secure sum without noise" in site.gate.ask(private(2, secure=terms_of())).detail
    little = terms_of(privacy=privacy_of(noise_multiplier=1e-6).text())
    decision = site.gate.ask(invitation(2, local="{}", secure=little))
    assert (decision.rule, "noise_multiplier" in decision.detail) == (Rule.BUDGET, True)  # dishonest move 43


def _kind(request: Any) -> str:
    return {"Invitation": "train", "EvaluationRequest": "evaluate"}.get(type(request).__name__, "statistics")


def test_the_run_that_would_exceed_the_budget_is_refused_before_its_download(tmp_path: Path) -> None:
    site = Site(tmp_path, epsilon=1.7)  # two uses of noise 4 are 1.54, three are 1.93
    assert [site.gate.admit(private(number), version()).is_allowed for number in (1, 2)] == [True, True]
    decision = site.gate.ask(private(3))
    assert decision.rule is Rule.BUDGET
    assert decision.detail.startswith("the budget of data set 'mri-2026' is spent: epsilon 1.5")
    assert site.gate.ask(private(2)).is_allowed, "what is charged may be done"
    assert site.gate.ask(private(3, local={"privacy.noise_multiplier": 400.0})).is_allowed, "more noise costs less"


def test_a_charge_without_a_record_allows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr("atoll.client.policy.budgets.ledger.write_anchor", fails)
    assert site.gate.admit(private(), version()).rule is Rule.STATE
    monkeypatch.undo()
    assert site.gate.admit(private(), version()).is_allowed
    monkeypatch.setattr("atoll.client.policy.decisions.DecisionLog.note_charge", fails)
    assert site.gate.admit(private(2), version()).rule is Rule.STATE


def test_no_metrics_of_data_with_a_budget_leave_with_an_update(tmp_path: Path) -> None:
    site, entry = Site(tmp_path), spooled(tmp_path)
    assert site.gate.disclosure_of(entry).metrics is MetricsLeave.NONE, "a run that is not known"
    site.gate.admit(private(), version())
    assert site.gate.disclosure_of(entry).metrics is MetricsLeave.NONE
    (folder := tmp_path / "of u").mkdir()
    other = Site(folder)
    other.gate.admit(invitation(task="u"), version())
    assert other.gate.disclosure_of(entry).metrics is MetricsLeave.PER_SITE


def test_an_update_is_of_the_data_that_its_round_was_charged_to_whatever_its_run_asks_for_since(tmp_path: Path) -> None:
    site, entry = Site(tmp_path), spooled(tmp_path)
    site.gate.admit(private(), version())
    assert site.gate.ask_upload(entry).is_allowed
    assert site.gate.ask(invitation(2, task="u")).is_allowed, "a task for data without a budget"
    assert site.gate.disclosure_of(entry).metrics is MetricsLeave.NONE
    assert site.gate.ask_upload(replace(entry, digest=Digest("another"))).is_allowed
    assert len(site.lines("privacy.charge")) == 2, "another update of the same data"


def test_terms_that_change_after_an_approval_wait_again(tmp_path: Path) -> None:
    from contextlib import closing

    from atoll.client.policy.decide import Standing
    from atoll.client.policy.history import PolicyHistory

    site = Site(tmp_path, before='approval = "each_run"\n')
    assert site.gate.ask(private()).rule is Rule.APPROVAL
    with closing(PolicyHistory(tmp_path)) as history:
        history.decided(RUN, Standing.APPROVED, 1.0)
    assert site.gate.ask(private()).is_allowed
    for name, value in (("epsilon", 9.0), ("noise_multiplier", 3.0), ("participations_max", 99), ("clip_norm", 2.0)):
        assert site.gate.ask(private(local={f"privacy.{name}": value})).rule is Rule.APPROVAL, name
    with closing(PolicyHistory(tmp_path)) as history:
        history.decided(RUN, Standing.APPROVED, 1.0)


def test_an_agent_with_a_damaged_ledger_does_not_start_and_a_running_one_allows_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.gate.admit(private(), version())
    (tmp_path / "budgets.json").write_text("{}")
    site.gate._budgets._ledger._seen = -1  # type: ignore[union-attr]
    decision = site.gate.ask(private(2))
    assert (decision.outcome, decision.rule) == (Outcome.WAITING, Rule.STATE)
    assert decision.detail == "this site's ledger of privacy budgets is damaged"
    site.gate.close()
    with pytest.raises(ConfigError, match=r"nothing is allowed; put the newer copy back"):
        site.start()


def test_two_agents_of_a_site_with_one_ledger_spend_one_budget(tmp_path: Path) -> None:
    sites = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shared = f'privacy.ledger = "{tmp_path / "shared"}"\n'
        sites.append(Site(tmp_path / name, epsilon=1.7, before=shared))
    assert [site.gate.admit(private(), version()).is_allowed for site in sites] == [True, True]
    assert [site.gate.admit(private(2), version()).rule for site in sites] == [Rule.BUDGET, Rule.BUDGET]


def test_a_name_that_the_policy_does_not_have_any_more_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    site.gate.admit(private(), version())
    site.gate.close()
    site.path.write_text(site.path.read_text().replace("mri-2026", "mri-2027"))
    site.start()
    assert "data set mri-2026 has charges, and the policy has no budget of this name" in caplog.text
    assert site.gate.ask(private(1)).is_allowed, "a new budget is a new name"


@pytest.mark.parametrize(
    ("data", "faults"),
    [
        ('name = "a"\ntasks = ["t"]\nepsilon_max = 1\ndelta = 1e-6\n', ["privacy.data[0].unit: missing"]),
        (
            'name = "a b"\ntasks = []\nepsilon_max = 0\ndelta = 1.0\nunit = "site"\n',
            ["privacy.data[0].name", "privacy.data[0].tasks", "epsilon_max", "delta", "unit"],
        ),
        ('name = "a"\ntasks = ["t"]\nepsilon_max = nan\ndelta = inf\nunit = "client"\n', ["epsilon_max", "delta"]),
    ],
)
def test_every_fault_of_a_budget_is_told_at_once(tmp_path: Path, data: str, faults: list[str]) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"{POLICY}[[privacy.data]]\n{data}")
    with pytest.raises(ConfigError) as refused:
        PolicyFile(path)
    assert len(refused.value.faults) == len(faults)
    for fault, wanted in zip(refused.value.faults, faults, strict=True):
        assert wanted in fault


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("", DATA.format(epsilon=1, unit="client"), "'mri-2026' occur twice"),
        ("error_details = true\n", "", "data with a budget ([[privacy.data]]) would leave in the text of errors"),
        ('privacy.ledger = "here"\n', "", "allowed: an absolute path"),
    ],
)
def test_budgets_that_do_not_fit_together_are_faults(tmp_path: Path, before: str, after: str, fault: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY + before + DATA.format(epsilon=8, unit="client") + after)
    with pytest.raises(ConfigError) as refused:
        PolicyFile(path)
    assert fault in str(refused.value)


def test_a_task_reads_each_data_set_whose_pattern_it_matches() -> None:
    data = [
        DataBudget(name=name, tasks=tasks, epsilon_max=1.0, delta=1e-6, unit="client")
        for name, tasks in (("a", ["mri:*"]), ("b", ["*:brain", "x"]), ("c", ["MRI:*"]))
    ]
    assert [each.name for each in budgets_of(data, "mri:brain")] == ["a", "b"]
    assert budgets_of(data, "ct:task") == []


@pytest.mark.parametrize("names", [[], ["mri-2026"]])
@pytest.mark.parametrize("hash_", [None, "00" * 32])
def test_a_memory_with_a_smaller_number_does_not_forget_an_emptied_ledger(
    tmp_path: Path, hash_: str | None, names: list[str]
) -> None:
    """0 is the number before the first charge, which has no entry: neither a hash nor names go with it."""
    site = Site(tmp_path)
    site.gate.admit(private(), version())
    site.gate.close()
    memory = json.loads((tmp_path / "budgets.json").read_text())
    changed = memory | {"count": 0, "hash": hash_ or memory["hash"], "names": names}
    (tmp_path / "budgets.json").write_text(json.dumps(changed))
    with sqlite3.connect(tmp_path / "policy.db") as database:
        database.execute("DELETE FROM budgets")
    is_beginning = bool(hash_) and not names  # of which the log of decisions knows that it has passed
    fault = (
        "has charged its budgets, and neither" if is_beginning else r"budgets\.json has been changed: .*count: got 0"
    )
    with pytest.raises(ConfigError, match=fault):
        site.start()


def test_an_agent_that_died_before_its_first_charge_starts(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.gate.close()
    (tmp_path / "budgets.json").write_text(json.dumps({"count": 0, "hash": "00" * 32, "names": []}))
    for number in (1, 2):
        site.start()
        assert site.gate.ask(private(number)).is_allowed
        assert site.gate.ask(private(number)).is_allowed
        site.gate.close()
    site.start()
    assert site.gate.admit(private(), version()).is_allowed
