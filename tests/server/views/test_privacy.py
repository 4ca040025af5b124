"""The charges that no fold has used yet, in what a person sees of an asynchronous private run."""

from pathlib import Path

from atoll.protocol.vocabulary import RunState
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, RunChange, RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.rounds.events import Effect, Event, PauseRequested, StopRequested
from atoll.server.views.privacy import waiting_of
from tests.cli.invoking import said, shown
from tests.server.journal.test_journal import CONFIG, entry
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_example_privacy import rules
from tests.server.rounds.test_privacy import closed, private
from tests.server.rounds.test_privacy import rules as client_rules


class Recorded(Flow):
    """A private asynchronous run with its events."""

    def __init__(self, **policy: object) -> None:
        self.events: list[tuple[float, Event]] = []
        super().__init__(rules={"privacy": rules(uses=9)}, concurrency=4, **policy)
        self.join("abcd")

    def do(self, event: object, at: float | None = None) -> list[Effect]:
        self.events.append((self.now if at is None else 1000.0 + at, event))  # type: ignore[arg-type]
        return super().do(event, at)


def waiting(clients: str, number: str) -> str:
    return f"{number} in no version yet, of {clients}: charged, and no end of the run refunds that"


def test_updates_of_an_open_buffer_and_of_the_next_one_are_charged_and_in_no_version() -> None:
    flow = Recorded()
    assert waiting_of(flow.machine) == ""
    flow.update("a")
    assert waiting_of(flow.machine) == waiting("a", "1 accepted update")
    flow.update("b")
    assert waiting_of(flow.machine) == "", "the fold of both has begun"
    flow.update("c")
    flow.update("d")
    both = waiting("c, d", "2 accepted updates")
    assert waiting_of(flow.machine) == both
    flow.fold()
    assert waiting_of(flow.machine) == both, "the next buffer does not exist"
    flow.do(PauseRequested("night"))
    assert flow.machine.ledger.state is RunState.PAUSED
    assert waiting_of(flow.machine) == both
    flow.do(StopRequested("enough"))
    assert waiting_of(flow.machine) == "", "the records of their rounds have the charge"


def test_a_run_with_cohorts_charges_nothing_that_waits() -> None:
    drive = private(client_rules())
    closed(drive)
    assert waiting_of(drive.machine) == ""


def test_a_run_and_its_guarantee_are_shown_with_the_charges_that_wait(tmp_path: Path) -> None:
    flow = Recorded()
    for client in "abc":
        flow.update(client)
    with StateDirectory.open(tmp_path / "state") as state:
        journal = Journal(state)
        journal.add_run(RunRow.new("r", CONFIG, flow.rules, 100.0))
        entries = [entry(seq, event, at=at) for seq, (at, event) in enumerate(flow.events, start=1)]
        journal.commit(Batch(entries=entries, changes=[RunChange("r", RunState.RUNNING)]))
    where = ("r", "--state", tmp_path / "state")
    sentence = waiting("c", "1 accepted update")
    assert sentence in said("run", "show", *where).splitlines()
    assert sentence in said("privacy", "show", *where).splitlines()
    assert shown("privacy", "show", *where)["waiting"] == sentence
