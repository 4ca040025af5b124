"""Deaths (kill -9) of a real coordinator at every journal entry of a ServerApp of ten rounds, with agents that live on.

Each run is of one coordinator that dies once and of the next one. The three agents are the same for all runs of a test:
they outlive every death and reconnect.
"""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

import atoll
from atoll.ground.process.crash_points import VARIABLE
from atoll.protocol.settings import quoted
from atoll.task.apps import with_app
from tests.federation.processes import Federation, ended_after
from tests.simulations.messages.simulating import digests
from tests.waiting import BOUND_S

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")

EVERY = "ATOLL_EVERY_DEATH"
"""The variable with which all places are tried (`make deaths`, about an hour), and not each twentieth."""

APP = with_app(str(Path(__file__).with_name("apps") / "ten_rounds"))
STEPS = ("journal.before_write", "exchange.entry", "exchange.effect")
"""A write is not begun; an entry is on disk, its effects are not carried out; an effect is about to be carried out."""


class Lives(Federation):
    """Runs of the same app, one after the other, by coordinators that die; all of the same agents."""

    def __init__(self, folder):
        super().__init__(folder, task=APP)
        self.file, self.num_runs = folder / "ten.toml", 0
        tables = f"task = {quoted(APP)}\nprogram.main = {quoted(APP)}\nround.min_available = 3\n"
        self.file.write_text(f"name = 'ten'\n{tables}[coordinator]\nlisten = '{self.address}'\n")

    def begin(self):
        """Return what is left of a run in which nothing dies."""
        self._begun()
        self.wait_for((self.state / "coordinator.json").exists)
        for place in range(3):
            partition = {"task.partition-id": place, "task.num-partitions": 3}
            self.agent(f"node-{place}", **partition, exit_when_done=False)
        return self._ended()

    def dying_at(self, place):
        """Return what is left of a run whose first coordinator dies at a place; None: the run does not come there."""
        code = self._begun("--again", **{VARIABLE: place}).wait(BOUND_S)
        assert code in (0, -signal.SIGKILL), self.log("coordinator")[-3000:]
        if code == 0:
            return None
        self._begun()
        return self._ended()

    def _begun(self, *options, **environment):
        return self.start("coordinator", "coordinator", self.file, "--state", self.state, *options, **environment)

    def _ended(self):
        assert self.wait_for_end() == 0, self.log("coordinator")[-3000:]
        self.num_runs += 1
        run = f"ten-{self.num_runs}"
        events = atoll.connect(self.state).run(run).follow(after=0)
        documents = [record for event in events for record in event.records if record["ended_at"] is not None]
        messages = [[of_any_run(message) for message in exchange] for exchange in digests(documents)]
        return messages, json.loads((self.state / "runs" / run / "program" / "result.json").read_text())


def of_any_run(message):
    """Return a message but for the digest of its reply, which has the run's id: contents after it come of the reply."""
    *known, reply, reply_bytes = message
    return *known, bool(reply), reply_bytes


def dead_everywhere(folder, step, stride):
    """Let a run die at each `stride`-th visit of a step; return the last visit, and those that changed a digest."""
    with ended_after(Lives(folder)) as it:
        undisturbed = it.begin()
        assert len(undisturbed[0]) == 20
        assert max(undisturbed[1]["calls"].values()) > 4, "the state of a client grows"
        wrong = []
        for number in itertools.count(1, stride):
            place = f"{step}:{number}"
            found = it.dying_at(place)
            if found is None:
                return number - stride, wrong
            wrong += [place] if found != undisturbed else []


def test_a_death_of_the_coordinator_changes_no_digest(tmp_path):
    with ended_after(Lives(tmp_path)) as it:
        undisturbed = it.begin()
        assert it.dying_at("exchange.entry:40") == undisturbed
        for agent in ("node-0", "node-1", "node-2"):
            assert it.running[agent].poll() is None, "an agent outlives its coordinators"


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("step", STEPS)
def test_no_death_at_any_place_changes_a_digest(step, tmp_path):
    last, wrong = dead_everywhere(tmp_path, step, stride=1 if os.environ.get(EVERY) else 20)
    assert last > 60
    assert not wrong
