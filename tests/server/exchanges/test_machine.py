"""The machine of exchanges, call by call: its answers, its deadlines, and a program that repeats itself or does not."""

import pytest

from atoll.protocol.vocabulary import (
    ClientId,
    Digest,
    FailureReason,
    LossReason,
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    Deliver,
    Effects,
    Event,
    ExchangeAsked,
    Message,
    NodesAsked,
    ProgramEnded,
    ProgramStarted,
    RepliesPulled,
    StartProgram,
)
from atoll.server.exchanges.ledger import Ledger
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.journal.codec import decode, encode
from atoll.server.rounds.events import (
    Accept,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CoordinatorStarted,
    EndRun,
    FilesLost,
    PauseRequested,
    PauseRun,
    Reject,
    Release,
    ResumeRequested,
    RunStarted,
    StopRequested,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)

NORTH, SOUTH = ClientId("north"), ClientId("south")


class Run:
    """A machine with two connected nodes and a started program, and its clock."""

    def __init__(self, **rules: float) -> None:
        self.machine = ExchangeMachine(ExchangeRules(**rules))  # type: ignore[arg-type]
        self.now = 100.0
        self.post(RunStarted(Digest("")))
        self.post(ClientJoined(NORTH, "1"))
        self.post(ClientJoined(SOUTH, "1"))
        self.post(ProgramStarted())

    def post(self, event: Event, after: float = 0.0) -> Effects:
        self.now += after
        return self.machine.receive(event, self.now)

    def reply(self, client: ClientId, number: int, content: str = "r") -> Effects:
        return self.post(UpdateReceived(update(client, number, content)))


def update(client: ClientId, number: int, content: str = "r") -> Update:
    return Update(client, RoundId(number), Version(0), Digest(content), 1, 1.0)


def message(client: ClientId = NORTH, content: str = "m", kind: str = "train") -> Message:
    return Message(client, kind, Digest(content), 10)


def asked(*messages: Message, call: int = 1, **more: object) -> ExchangeAsked:
    return ExchangeAsked(call, messages, **more)  # type: ignore[arg-type]


def test_replies_are_returned_in_the_order_of_the_messages() -> None:
    run = Run()
    effects = run.post(asked(message(SOUTH), message(NORTH)))
    assert [e.number for e in effects if isinstance(e, Deliver)] == [1, 2]
    assert run.reply(NORTH, 2) == (Accept(NORTH, RoundId(2), Digest("r")),)
    assert AnswerMessages(1, (RoundId(1), RoundId(2))) in run.reply(SOUTH, 1)


def test_an_error_of_a_node_and_a_refused_reply_are_answers() -> None:
    run = Run()
    run.post(asked(message(NORTH), message(SOUTH)))
    run.post(ClientFailed(NORTH, RoundId(1), FailureReason.TRAINING_FAILED, "no data"))
    effects = run.post(UpdateRefused(SOUTH, RoundId(2), RejectReason.NOT_FINITE, "w is NaN"))
    assert AnswerMessages(1, (RoundId(1), RoundId(2))) in effects
    exchange = run.machine.exchange(1)
    assert exchange is not None
    sent = exchange.sent
    assert [(one.fate, one.reason) for one in sent] == [("failed", "training_failed"), ("refused", "not_finite")]
    assert run.machine.ledger.state is RunState.RUNNING


def test_a_message_to_nobody_is_answered_at_once() -> None:
    effects = Run().post(asked(message(ClientId("east"))))
    assert AnswerMessages(1, (RoundId(1),)) in effects


def test_after_the_deadline_the_call_returns_with_what_is_in() -> None:
    run = Run()
    run.post(asked(message(NORTH), message(SOUTH), timeout=30.0))
    run.reply(SOUTH, 2)
    effects = run.post(TimePassed(), after=30.0)
    assert Release(NORTH, RoundId(1), ReleaseReason.OUT_OF_TIME) in effects
    assert AnswerMessages(1, (RoundId(2),)) in effects
    late = run.reply(NORTH, 1)
    assert isinstance(late[0], Reject)
    assert late[0].reason is RejectReason.TOO_LATE


def test_an_upload_that_has_begun_gets_the_grace() -> None:
    run = Run(grace=5.0)
    run.post(asked(message(NORTH), timeout=30.0))
    run.post(UploadBegun(NORTH, RoundId(1)))
    assert run.post(TimePassed(), after=30.0) == ()
    assert AnswerMessages(1, (RoundId(1),)) in run.reply(NORTH, 1)


def test_a_quorum_and_its_linger_close_an_exchange() -> None:
    run = Run(quorum=0.5, linger=2.0)
    run.post(asked(message(NORTH), message(SOUTH)))
    run.reply(NORTH, 1)
    assert run.machine.deadline == run.now + 2.0
    effects = run.post(TimePassed(), after=2.0)
    assert Release(SOUTH, RoundId(2), ReleaseReason.ROUND_CLOSED) in effects
    assert AnswerMessages(1, (RoundId(1),)) in effects


def test_a_node_has_one_message_at_a_time() -> None:
    run = Run()
    run.post(asked(message(content="a"), call=1, in_order=False))
    assert not any(isinstance(e, Deliver) for e in run.post(asked(message(content="b"), call=2, in_order=False)))
    effects = run.reply(NORTH, 1)
    assert AnswerMessages(1, (RoundId(1),)) in effects
    assert [e.number for e in effects if isinstance(e, Deliver)] == [2]


def test_pushed_messages_are_pulled_once_in_the_order_asked() -> None:
    run = Run()
    assert AnswerMessages(1, (RoundId(1), RoundId(2)), is_pushed=True) in run.post(
        asked(message(NORTH), message(SOUTH), is_waiting=False)
    )
    both = (RoundId(1), RoundId(2))
    assert run.post(RepliesPulled(2, both)) == (AnswerMessages(2, ()),)
    run.reply(SOUTH, 2)
    run.reply(NORTH, 1)
    assert run.post(RepliesPulled(3, both)) == (AnswerMessages(3, both),)
    assert run.post(RepliesPulled(4, both)) == (AnswerMessages(4, ()),)


# ---------------------------------------------------------------- files that are lost


def test_a_lost_content_or_unread_reply_ends_its_message_and_the_program_is_told() -> None:
    run = Run()
    run.post(asked(message(NORTH, "x"), message(SOUTH, "y")))
    run.reply(NORTH, 1)
    run.post(CoordinatorStarted(run.now), after=10.0)
    effects = run.post(FilesLost((Digest("r"),), contents=(Digest("y"),), detail="both are missing"))
    assert [effect for effect in effects if isinstance(effect, EndRun)] == []
    assert run.machine.ledger.settled[1].answered == (1, 2)
    exchange = run.machine.exchange(1)
    assert exchange is not None
    assert [(one.fate, one.reason, one.reply) for one in exchange.sent] == [("lost", "files_lost", None)] * 2


@pytest.mark.parametrize("is_pushed", [False, True])
def test_without_a_reply_that_the_program_has_had_the_run_fails_and_says_why(is_pushed: bool) -> None:
    run = Run()
    run.post(asked(message(NORTH), *([message(SOUTH)] if is_pushed else []), is_waiting=not is_pushed))
    run.reply(NORTH, 1)
    if is_pushed:
        run.post(RepliesPulled(2, (RoundId(1),)))
    effects = run.post(FilesLost((Digest("r"),), detail="r.bin is missing"))
    [end] = [effect for effect in effects if isinstance(effect, EndRun)]
    assert end.state is RunState.FAILED
    assert "r.bin is missing" in end.cause


# ---------------------------------------------------------------- a program that begins again


def test_a_new_process_is_answered_from_the_journal_and_goes_on() -> None:
    run = Run()
    run.post(NodesAsked(1))
    run.post(asked(message(), call=2))
    run.reply(NORTH, 1)
    run.post(ClientJoined(ClientId("east"), "1"))
    assert run.post(ProgramEnded(is_dead=True)) == (StartProgram(),)
    run.post(ProgramStarted())
    assert run.post(NodesAsked(1)) == (AnswerNodes(1, (NORTH, SOUTH)),)
    assert run.post(asked(message(), call=2)) == (AnswerMessages(2, (RoundId(1),)),)
    assert run.post(NodesAsked(3)) == (AnswerNodes(3, (ClientId("east"), NORTH, SOUTH)),)
    assert [e.number for e in run.post(asked(message(content="new"), call=4)) if isinstance(e, Deliver)] == [2]


def test_a_restart_of_the_coordinator_changes_no_answer_before_a_lease_expires() -> None:
    run = Run()
    run.post(asked(message()))
    run.reply(NORTH, 1)
    run.post(CoordinatorStarted(down_since=run.now), after=5.0)
    run.post(ProgramStarted())
    run.post(asked(message()))
    assert run.post(NodesAsked(2)) == (AnswerNodes(2, (NORTH, SOUTH)),), "nobody has reconnected yet"
    assert not any(isinstance(e, Deliver) for e in run.post(asked(message(content="next"), call=3)))
    assert [e.number for e in run.post(ClientJoined(NORTH, "2")) if isinstance(e, Deliver)] == [2]
    run.post(ClientLost(SOUTH, LossReason.LEASE_EXPIRED))
    assert run.post(NodesAsked(4)) == (AnswerNodes(4, (NORTH,)),)


def test_an_open_exchange_goes_on_without_the_program() -> None:
    run = Run()
    run.post(asked(message()))
    run.post(ProgramEnded(is_dead=True))
    run.reply(NORTH, 1)
    run.post(ProgramStarted())
    assert run.post(asked(message(), call=7)) == (AnswerMessages(7, (RoundId(1),)),)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (
            asked(message(content="x")),
            "exchange 1: message 1 of 1 differs from before: now train to north with content x",
        ),
        (asked(message(SOUTH)), "now train to south"),
        (asked(message(kind="evaluate")), "now evaluate to north"),
        (asked(message(), message(SOUTH)), "exchange 1: it sent 1 before, now 2"),
        (asked(message(), is_waiting=False), "exchange 1: it waits for the replies in the journal, now it pulls them"),
    ],
)
def test_another_program_ends_the_run_and_names_the_exchange(now: ExchangeAsked, says: str) -> None:
    run = Run()
    run.post(asked(message()))
    run.reply(NORTH, 1)
    run.post(ProgramStarted())
    (end,) = run.post(now)
    assert isinstance(end, EndRun)
    assert end.state is RunState.FAILED
    assert says in end.cause


def test_a_program_that_returns_too_early_is_another_one() -> None:
    run = Run()
    run.post(asked(message()))
    run.reply(NORTH, 1)
    run.post(ProgramStarted())
    (end,) = run.post(ProgramEnded())
    assert isinstance(end, EndRun)
    assert "exchange 1: main() returned" in end.cause


def test_threads_may_ask_in_another_order_and_a_new_call_waits_for_the_rest() -> None:
    run = Run()
    for number, content in enumerate(("a", "b"), start=1):
        run.post(asked(message(content=content), call=number, in_order=False))
        run.reply(NORTH, number)
    run.post(ProgramStarted())
    assert run.post(asked(message(content="b"), call=1, in_order=False)) == (AnswerMessages(1, (RoundId(2),)),)
    assert run.post(asked(message(content="c"), call=2, in_order=False)) == ()  # held
    effects = run.post(asked(message(content="a"), call=3, in_order=False))
    assert effects[0] == AnswerMessages(3, (RoundId(1),))
    assert [e.number for e in effects if isinstance(e, Deliver)] == [3]


def test_a_thread_that_never_asks_again_ends_the_run() -> None:
    run = Run(hold=60.0)
    run.post(asked(message(content="a"), in_order=False))
    run.reply(NORTH, 1)
    run.post(ProgramStarted())
    assert run.post(asked(message(content="c"), in_order=False)) == ()
    (end,) = run.post(TimePassed(), after=60.0)
    assert isinstance(end, EndRun)
    assert "exchange 1 was not requested again within 60 s" in end.cause


def test_a_process_that_dies_again_and_again_fails_the_run() -> None:
    run = Run(restarts_max=2)
    assert run.post(ProgramEnded(is_dead=True)) == (StartProgram(),)
    assert run.post(ProgramEnded(is_dead=True)) == (StartProgram(),)
    (end,) = run.post(ProgramEnded(is_dead=True))
    assert isinstance(end, EndRun)
    assert "died 3 times" in end.cause


def test_what_the_program_raised_is_the_cause_and_a_resume_begins_again() -> None:
    run = Run()
    run.post(asked(message()))
    assert EndRun(RunState.FAILED, "KeyError: '0'") in run.post(ProgramEnded("KeyError: '0'"))
    assert run.post(ResumeRequested()) == (StartProgram(),)
    run.post(ClientJoined(NORTH, "2"))
    run.post(ProgramStarted())
    effects = run.post(asked(message()))  # the first one was cut by the end: it is sent again
    assert [e.number for e in effects if isinstance(e, Deliver)] == [2]
    assert run.machine.ledger.num_exchanges == 2


def test_an_outage_moves_the_deadline_and_starts_the_program() -> None:
    run = Run(outage_max=100.0)
    run.post(asked(message(), timeout=30.0))
    effects = run.post(CoordinatorStarted(down_since=run.now + 10.0), after=60.0)
    assert effects == (StartProgram(),)
    assert run.machine.deadline == 100.0 + 30.0 + 50.0
    assert [
        e.number for e in run.post(ClientJoined(NORTH, "2", working_on=(RoundId(1),))) if isinstance(e, Deliver)
    ] == [1]


def test_no_time_runs_after_a_restart_before_the_nodes_of_before_are_here() -> None:
    """Agents that start anew may import for longer than a lease and a timeout."""
    run = Run()
    run.post(asked(message(), message(SOUTH), timeout=30.0))
    run.post(CoordinatorStarted(down_since=run.now + 10.0, allowance=300.0), after=10.0)
    assert run.machine.deadline == 110.0 + 300.0
    run.post(ProgramStarted())
    assert run.post(NodesAsked(1), after=60.0) == (AnswerNodes(1, (NORTH, SOUTH)),), "as before"
    (deliver,) = [e for e in run.post(ClientJoined(NORTH, "2")) if isinstance(e, Deliver)]
    assert deliver.deadline == 170.0 + 20.0, "what was left to it"
    run.post(asked(message(), message(SOUTH), timeout=30.0))
    run.reply(NORTH, 1)
    (deliver,) = [e for e in run.post(ClientJoined(SOUTH, "2"), after=20.0) if isinstance(e, Deliver)]
    assert run.machine.deadline == deliver.deadline == 190.0 + 20.0
    assert run.post(UpdateReceived(update(SOUTH, 2)), after=15.0)[-1] == AnswerMessages(1, (RoundId(1), RoundId(2)))


@pytest.mark.parametrize("is_told", [True, False])
def test_the_time_goes_on_where_a_node_of_before_does_not_come_back(is_told: bool) -> None:
    run = Run()
    run.post(asked(message(), message(SOUTH), timeout=30.0))
    run.post(CoordinatorStarted(down_since=run.now, allowance=300.0))
    run.post(ClientJoined(NORTH, "2"), after=50.0)
    if is_told:
        run.post(ClientLost(SOUTH, LossReason.LEFT), after=50.0)
        assert run.machine.deadline == 200.0 + 30.0
    else:
        run.post(TimePassed(), after=250.0)
        assert run.machine.deadline == 400.0 + 30.0
    run.post(CoordinatorStarted(down_since=run.now))
    assert run.machine.deadline == (230.0 if is_told else 430.0), "no allowance: no wait"


def test_a_stop_releases_the_nodes() -> None:
    run = Run()
    run.post(asked(message()))
    effects = run.post(StopRequested("enough"))
    assert Release(NORTH, RoundId(1), ReleaseReason.RUN_ENDED) in effects
    assert effects[-1] == EndRun(RunState.STOPPED, "enough")
    assert isinstance(run.reply(NORTH, 1)[0], Reject)


def test_main_that_returns_finishes_the_run() -> None:
    run = Run()
    run.post(asked(message()))
    run.reply(NORTH, 1)
    assert run.post(ProgramEnded()) == (EndRun(RunState.FINISHED, "main() returned after 1 exchange"),)


# ---------------------------------------------------------------- memory, and the operator


def test_a_closed_exchange_stays_in_memory_without_its_messages() -> None:
    run = Run()
    for number in range(1, 51):
        run.post(asked(message(NORTH, f"{number}"), message(SOUTH, f"{number}"), call=number))
        run.reply(NORTH, 2 * number - 1)
        run.reply(SOUTH, 2 * number)
    ledger = run.machine.ledger
    assert (ledger.num_exchanges, len(ledger.settled), ledger.open) == (50, 50, {})
    assert ledger.sent(RoundId(3)) is None
    assert len(encode(ledger)) < 50 * 250, "about 200 bytes for each exchange"
    copy = ExchangeMachine(ExchangeRules(), decode(Ledger, encode(ledger), "here"))
    copy.receive(ProgramStarted(), run.now)
    effects = copy.receive(asked(message(NORTH, "1"), message(SOUTH, "1"), call=1), run.now)
    assert effects == (AnswerMessages(1, (RoundId(1), RoundId(2))),)
    late = run.post(UpdateReceived(update(NORTH, 3, "other")))
    assert isinstance(late[0], Reject)
    assert late[0].reason is RejectReason.TOO_LATE


def test_a_program_that_is_repeated_beyond_the_replies_that_are_kept_ends_the_run() -> None:
    run = Run(keep_replies=2)
    for number in (1, 2, 3):
        run.post(asked(message(content=f"{number}"), call=number))
        run.reply(NORTH, number)
    run.post(ProgramStarted())
    (end,) = run.post(asked(message(content="1")))
    assert isinstance(end, EndRun)
    assert "the replies of exchange 1 are no longer kept (program.keep_replies = 2)" in end.cause


def test_a_pause_lets_open_exchanges_end_and_holds_new_ones_until_the_resume() -> None:
    run = Run()
    run.post(asked(message(), call=1))
    assert run.post(PauseRequested("lunch")) == ()
    assert run.machine.ledger.pausing == "it pauses when exchange 1 is over"
    assert PauseRun("lunch") in run.reply(NORTH, 1)
    assert run.machine.ledger.state is RunState.PAUSED
    assert run.machine.deadline is None
    assert run.post(asked(message(content="next"), call=2)) == ()
    assert run.post(NodesAsked(3)) == (AnswerNodes(3, (NORTH, SOUTH)),), "what it asks besides is answered"
    effects = run.post(ResumeRequested())
    assert [e.number for e in effects if isinstance(e, Deliver)] == [2]
    assert AnswerMessages(2, (RoundId(2),)) in run.reply(NORTH, 2)


def test_a_pause_without_an_open_exchange_takes_effect_at_once_and_can_be_withdrawn() -> None:
    run = Run()
    assert run.post(PauseRequested("")) == (PauseRun(""),)
    assert run.post(ResumeRequested()) == ()
    assert run.machine.ledger.state is RunState.RUNNING
    run.post(asked(message()))
    run.post(PauseRequested(""))
    run.post(ResumeRequested())
    assert not any(isinstance(e, PauseRun) for e in run.reply(NORTH, 1))


def test_a_paused_run_has_no_process_after_a_restart_until_it_is_resumed() -> None:
    run = Run()
    run.post(PauseRequested(""))
    assert run.post(CoordinatorStarted(down_since=run.now)) == ()
    assert run.post(ResumeRequested(wait=True)) == ()
    assert run.machine.ledger.state is RunState.QUEUED
    assert run.post(ResumeRequested()) == (StartProgram(),)


def test_a_stop_in_the_midst_of_pulls_lets_the_resumed_program_push_and_pull_again() -> None:
    run = Run()
    run.post(asked(message(NORTH), message(SOUTH), is_waiting=False))
    run.reply(NORTH, 1)
    both = (RoundId(1), RoundId(2))
    assert run.post(RepliesPulled(2, both)) == (AnswerMessages(2, (RoundId(1),)),)
    run.post(StopRequested("later"))
    run.post(ResumeRequested())
    for client in (NORTH, SOUTH):
        run.post(ClientJoined(client, "2"))
    run.post(ProgramStarted())
    again = (RoundId(3), RoundId(4))
    effects = run.post(asked(message(NORTH), message(SOUTH), is_waiting=False))
    assert AnswerMessages(1, again, is_pushed=True) in effects
    run.reply(NORTH, 3)
    run.reply(SOUTH, 4)
    assert run.post(RepliesPulled(2, again)) == (AnswerMessages(2, again),)


def test_a_look_that_finds_the_same_nodes_need_not_be_an_event() -> None:
    run = Run()
    assert not run.machine.has_looked()
    run.post(NodesAsked(1))
    assert run.machine.has_looked()
    run.post(ClientJoined(ClientId("east"), "1"))
    assert not run.machine.has_looked()
    run.post(NodesAsked(2))
    run.post(asked(message(), call=3))
    assert not run.machine.has_looked(), "a look after another exchange has a place of its own"


def test_a_repetition_gets_each_look_as_often_as_it_came_also_those_that_were_no_events() -> None:
    """A program that uses its third look alone sent to two nodes; so does its repetition, whatever is here by then."""
    run = Run()
    two, east = (NORTH, SOUTH), ClientId("east")
    assert run.post(NodesAsked(1)) == (AnswerNodes(1, two),)
    for _ in range(2):
        assert run.machine.has_looked()
    run.post(ClientJoined(east, "1"))
    three = tuple(sorted((*two, east)))
    assert run.post(NodesAsked(4, left_out=2)) == (AnswerNodes(4, three),)
    run.post(asked(message(), call=5))
    for _ in range(2):
        run.post(ProgramStarted())
        for call, nodes in enumerate([two, two, two, three, three], start=1):
            assert run.post(NodesAsked(call)) == (AnswerNodes(call, nodes),)


@pytest.mark.parametrize("end", [StopRequested("later"), ProgramEnded("KeyError: '0'")])
def test_a_resumed_program_sends_again_all_that_came_after_a_push_that_the_end_cut_off(end: Event) -> None:
    run = Run()
    run.post(asked(message(content="before")))
    run.reply(NORTH, 1)
    run.post(asked(message(SOUTH, "slow"), call=2, is_waiting=False))
    run.post(asked(message(content="after"), call=3, is_waiting=False))
    run.reply(NORTH, 3)
    assert run.post(RepliesPulled(4, (RoundId(3),))) == (AnswerMessages(4, (RoundId(3),)),)
    run.post(asked(message(content="follows from message 3"), call=5))
    run.reply(NORTH, 4)
    run.post(end)
    run.post(ResumeRequested())
    for client in (NORTH, SOUTH):
        run.post(ClientJoined(client, "2"))
    run.post(ProgramStarted())
    assert run.post(asked(message(content="before"))) == (AnswerMessages(1, (RoundId(1),)),)
    run.post(asked(message(SOUTH, "slow"), call=2, is_waiting=False))
    effects = run.post(asked(message(content="after"), call=3, is_waiting=False))
    assert AnswerMessages(3, (RoundId(6),), is_pushed=True) in effects
    run.reply(NORTH, 6)
    assert run.post(RepliesPulled(4, (RoundId(6),))) == (AnswerMessages(4, (RoundId(6),)),)
    run.post(asked(message(content="follows from message 6"), call=5))
    assert AnswerMessages(5, (RoundId(7),)) in run.reply(NORTH, 7)
    assert run.machine.ledger.state is RunState.RUNNING


def test_an_exchange_that_a_stop_cuts_off_is_none_of_those_whose_replies_are_kept() -> None:
    run = Run(keep_replies=1)
    run.post(asked(message(content="1")))
    run.reply(NORTH, 1)
    run.post(asked(message(content="2"), call=2))
    assert run.machine.ledger.first_kept(1) == 1, "the replies of exchange 1 stay until exchange 2 has closed"
    run.post(StopRequested("later"))
    run.post(ResumeRequested())
    run.post(ProgramStarted())
    assert run.post(asked(message(content="1"))) == (AnswerMessages(1, (RoundId(1),)),)
    run.post(asked(message(content="2"), call=2))
    run.post(ClientJoined(NORTH, "2"))
    run.reply(NORTH, 3)
    assert run.machine.ledger.first_kept(1) == 3


def test_an_exchange_after_a_push_that_is_open_does_not_let_the_replies_before_it_go() -> None:
    run = Run(keep_replies=1)
    run.post(asked(message(content="1")))
    run.reply(NORTH, 1)
    run.post(asked(message(SOUTH, "slow"), call=2, is_waiting=False))
    run.post(asked(message(content="3"), call=3))
    run.reply(NORTH, 3)
    assert run.machine.ledger.first_kept(1) == 1
    run.post(StopRequested("later"))
    assert run.machine.ledger.first_kept(1) == 1, "exchanges 2 and 3 are sent again"
    assert run.machine.ledger.first_kept(0) == 1
    assert run.machine.ledger.first_kept(2) == 1


def test_a_call_that_is_held_has_its_whole_time_again_after_a_pause() -> None:
    run = Run(hold=60.0)
    for number, content in enumerate("ab", 1):
        run.post(asked(message(content=content), in_order=False))
        run.reply(NORTH, number)
    run.post(ProgramStarted())
    assert run.post(asked(message(content="c"), in_order=False)) == ()
    run.post(PauseRequested("lunch"))
    assert run.post(ResumeRequested(), after=1000.0) == ()
    assert run.post(asked(message(content="a"), call=2, in_order=False), after=50.0) == (
        AnswerMessages(2, (RoundId(1),)),
    )
    assert isinstance(run.post(TimePassed(), after=10.0)[0], EndRun)


def test_a_repetition_gets_no_replies_where_it_got_none_though_it_polls_for_others_than_the_next() -> None:
    """Polls one message at a time, or for more once a further one was pushed: a poll without replies is no event."""
    run = Run(hold=60.0)
    one, two, three = RoundId(1), RoundId(2), RoundId(3)
    pushed = [asked(message(client, str(n)), call=n, is_waiting=False) for n, client in ((1, NORTH), (2, SOUTH))]
    for ask in pushed:
        run.post(ask)
    assert not run.machine.has_pull_for((one,))
    run.reply(SOUTH, 2)
    assert run.post(RepliesPulled(3, (two,))) == (AnswerMessages(3, (two,)),)
    assert not run.machine.has_pull_for((one,))
    run.post(asked(message(SOUTH, "3"), call=4, is_waiting=False))
    run.reply(NORTH, 1)
    run.reply(SOUTH, 3)
    assert run.post(RepliesPulled(5, (one, three))) == (AnswerMessages(5, (one, three)),)
    run.post(ProgramStarted())
    run.post(pushed[0])
    assert run.post(RepliesPulled(2, (two,))) == (AnswerMessages(2, ()),), "it had pushed two by then"
    run.post(pushed[1])
    assert not run.machine.has_pull_for((one,)), "a poll for others need not be an event again and again"
    assert run.post(RepliesPulled(4, (two,))) == (AnswerMessages(4, (two,)),)
    assert run.post(RepliesPulled(5, (one,))) == (AnswerMessages(5, ()),)
    run.post(asked(message(SOUTH, "3"), call=6, is_waiting=False))
    assert run.post(RepliesPulled(7, (three, one))) == (AnswerMessages(7, (one, three)),), "a set has any order"
    assert run.machine.deadline is None
    assert run.machine.ledger.state is RunState.RUNNING


def test_a_repetition_that_never_asks_for_the_replies_of_before_ends_the_run() -> None:
    run = Run(hold=60.0)
    both = (RoundId(1), RoundId(2))
    run.post(asked(message(NORTH), message(SOUTH), is_waiting=False))
    run.reply(NORTH, 1)
    run.post(RepliesPulled(2, both))
    run.post(ProgramStarted())
    run.post(asked(message(NORTH), message(SOUTH), is_waiting=False))
    assert run.post(RepliesPulled(2, both[1:])) == (AnswerMessages(2, ()),)
    run.reply(SOUTH, 2)
    (end,) = run.post(TimePassed(), after=60.0)
    assert isinstance(end, EndRun)
    assert "pull 1 was not requested again within 60 s: the server program is not deterministic" in end.cause
