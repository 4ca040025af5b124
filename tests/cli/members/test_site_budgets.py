"""`atoll site budgets` and the acceptance of a lost ledger."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.client.policy.history import NAME, PolicyHistory
from tests.cli.invoking import invoke, refused, shown
from tests.client.policy.budgets.test_gate import Site, private
from tests.client.policy.test_gate import invitation, spooled, version, written


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "atoll-agent-north"
    folder.mkdir()
    site = Site(folder, epsilon=1.7)
    for number in (1, 2):
        assert site.gate.admit(private(number), version()).is_allowed
    site.gate.ask_upload(spooled(folder))
    site.gate.close()
    return site


def of(site: Site, *command: object) -> Any:
    return shown("site", "budgets", "--state", site.folder, *command)


def test_the_budgets_are_shown_with_their_runs_and_what_is_left(site: Site) -> None:
    found = of(site, "--policy", site.path)
    assert found["ledger"] == str(site.folder / NAME)
    [data] = found["budgets"]
    [run] = data["runs"]
    assert (data["data"], data["unit"], data["tasks"]) == ("mri-2026", "client", ["t"])
    assert (data["charges"], data["uses_left"], data["epsilon_max"], data["delta"]) == (2, 0, 1.7, 1e-6)
    assert data["spent"] == run["epsilon"] == pytest.approx(1.543630, abs=1e-6)
    assert (run["run"], run["coordinator"], run["charges"], run["last_at"]) == ("r-1", "north:7070", 2, 1_777_896_000.0)
    assert data["refused"].startswith("the budget of data set 'mri-2026' is spent: epsilon 1.54363 of 1.7 at delta")
    said = invoke("site", "budgets", "--state", site.folder, "--policy", site.path)
    assert [line.split()[:3] for line in said.stdout.splitlines()[1:]] == [
        ["mri-2026", "client", "all"],
        ["mri-2026", "client", "r-1"],
    ]
    assert "mri-2026: the budget of data set 'mri-2026' is spent" in said.stderr


def test_names_that_the_policy_lacks_and_new_ones_are_shown(site: Site) -> None:
    assert [data["data"] for data in of(site)["budgets"]] == ["mri-2026"], "without a policy, those of the ledger"
    site.path.write_text(site.path.read_text().replace("mri-2026", "mri-2027").replace("= 1.7", "= 9.0"))
    new, old = of(site, "--policy", site.path)["budgets"]
    assert (new["data"], new["charges"], new["uses_left"], new["refused"]) == ("mri-2027", 0, None, "")
    assert (old["data"], old["charges"]) == ("mri-2026", 2)
    assert "the policy has no budget of this name, so that nothing guards its data" in old["refused"]


def test_a_raised_budget_is_shown_as_refused(site: Site) -> None:
    site.path.write_text(site.path.read_text().replace("= 1.7", "= 9.0"))
    [data] = of(site, "--policy", site.path)["budgets"]
    assert "a budget may be lowered, and a new budget is a new name" in data["refused"]
    assert data["uses_left"] == 0


def test_a_lost_ledger_is_told_by_the_check_and_closed_by_the_operator(site: Site) -> None:
    (site.folder / NAME).unlink()
    with closing(PolicyHistory(site.folder)):
        [fault] = refused("site", "budgets", "--state", site.folder, "--policy", site.path)
    assert "put back from an older copy, or removed: nothing is allowed; put the newer copy back" in fault
    assert shown("site", "accept-rollback", "--budgets", "--policy", site.path, "--state", site.folder) == {
        "closed": ["mri-2026"]
    }
    assert [line["action"] for line in written(site.folder) if line["role"] == "local"] == ["site.budget_closed"]
    [data] = of(site, "--policy", site.path)["budgets"]
    assert "a new budget is a new name" in data["refused"]
    site.start()
    assert "a new budget is a new name" in site.gate.ask(private(1)).detail
    assert site.gate.ask(invitation(task="u")).is_allowed
    site.gate.close()
    site.path.write_text(site.path.read_text().replace("mri-2026", "mri-2027"))
    site.start()
    assert site.gate.admit(private(1), version()).is_allowed
    site.gate.close()


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (("--budgets", "--new-key"), "name either a RUN"),
        (("r-1", "--budgets"), "name either a RUN"),
        (("r-1", "--policy", "policy.toml"), "--policy belongs to --budgets"),
    ],
)
def test_what_is_accepted_is_named_once(site: Site, command: tuple[str, ...], fault: str) -> None:
    [found] = refused("site", "accept-rollback", *command, "--state", site.folder)
    assert fault in found
