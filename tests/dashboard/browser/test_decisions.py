"""Requests that wait at a real site, approved and rejected on its page: by keyboard, by mouse, and without scripts."""

import re
from pathlib import Path
from typing import Any

import pytest

from atoll.server.journal.holder import running_coordinator
from tests.cli.federation import TINY, Federation, federation, start_run, wait_for
from tests.cli.invoking import invoke, shown
from tests.dashboard.browser.conftest import is_place, looked_at
from tests.dashboard.browser.looking import tabbed, until

pytestmark = pytest.mark.long

WAYS = (("approve", True, "keys"), ("reject", True, "mouse"), ("approve", False, "mouse"), ("reject", False, "keys"))
"""The decision, whether the page has scripts, and by what it is made."""

BUTTONS = {
    "approve": "form[action='/agents/1/control/approve?run={}'] button:not([formaction])",
    "reject": "button[formaction='/agents/1/control/reject?run={}']",
}


def test_a_waiting_request_is_decided_on_its_page(chromium: Any, tmp_path: Path) -> None:
    with federation(tmp_path) as it:
        site = it.folder / "atoll-agent-a"
        ask_first(it)
        with looked_at(chromium, str(site), home=tmp_path) as look:
            for number, (act, has_scripts, by) in enumerate(WAYS):
                with look.context(java_script_enabled=has_scripts) as context:
                    page = context.new_page()
                    page.goto(f"{look.base}/agents/1", wait_until="load")
                    overrides = ("rounds=1000", "pause=0.5", "round.min_available=2", "round.quorum=1")
                    run = start_run(it, f"{act}-{number}", *overrides)["run"]
                    wait_for(lambda run=run: standing(site, run) == "undecided")
                    button = BUTTONS[act].format(run)
                    if has_scripts:  # the page changes by itself, and a change takes no focus away
                        page.locator(button).wait_for()
                    else:
                        page.reload(wait_until="load")
                    decide(page, button, by, has_scripts=has_scripts)
                    assert page.locator("h1").inner_text() == "Done"
                    wanted = {"approve": "approved", "reject": "rejected"}[act]
                    assert standing(site, run) == wanted
                    with page.expect_navigation():
                        page.get_by_role("link", name="The request").click()
                    assert page.locator("tbody tr", has_text=run).locator(f".m-{wanted}").inner_text().endswith(wanted)
                    assert not page.locator(button).count()
                takes_part = re.compile(rf"{run}: round \d+: a reported")
                if act == "approve":
                    wait_for(lambda seen=takes_part: seen.search(it.log("coordinator")))
                invoke("run", "stop", run, "--state", it.state)
                wait_for(lambda run=run: it.run_state(run) == "stopped")
                assert bool(takes_part.search(it.log("coordinator"))) == (act == "approve")
        assert look.taken() == []


def ask_first(it: Federation) -> None:
    """Restart the agent of site `a` with a policy by which each run waits for its operator."""
    it.processes["a"].kill()
    it.processes["a"].wait()
    policy = it.folder / "policy.toml"
    policy.write_text('tasks = ["*"]\nruns = ["*"]\napproval = "each_run"\n')
    running = running_coordinator(it.state)
    assert running is not None
    it.start("a", "agent", f"{TINY}:task", "--site", "a", "--coordinator", running.address, "--policy", policy)
    wait_for(lambda: is_place(str(it.folder / "atoll-agent-a")))


def standing(site: Path, run: str) -> str:
    """Return what the site has decided on a run; empty: it has not asked."""
    return next((str(row["standing"]) for row in shown("site", "list", "--state", site) if row["run"] == run), "")


def decide(page: Any, button: str, by: str, *, has_scripts: bool) -> None:
    """Press a button of the page of a site, by keys after the page was read again."""
    if by == "mouse":
        with page.expect_navigation():
            page.locator(button).click()
        return
    tabbed(page, button)
    if has_scripts:
        page.evaluate("document.addEventListener('changed', () => { window.wasRead = true; })")
        until(page, "window.wasRead === true")
        assert page.evaluate("selector => document.activeElement.matches(selector)", button)
    with page.expect_navigation():
        page.keyboard.press("Enter")
