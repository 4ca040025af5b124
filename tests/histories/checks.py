"""The checks of a history: what an outside oracle says about it, and architecture, invariant 8.

The machine has checked invariants 1 to 5 itself, after each event (`validate`).
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.client.session import events as client
from atoll.client.session.session import SessionRules
from atoll.protocol.vocabulary import TERMINAL, FailureReason, Fate, RoundId
from atoll.server.rounds import events as server
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.selection.sampling import draw
from tests.histories.budgets import faults_of_budgets
from tests.histories.history import AgentStep, History, facts_of
from tests.histories.parts import faults_of_parts
from tests.histories.referee.referee import Referee

EPSILON = 1e-6


def faults_of(history: History) -> Iterator[str]:
    """Yield the faults of a history; the referee knows rounds without secure sums and budgets alone."""
    if history.scenario.rules.secure is not None or history.scenario.rules.privacy is not None:
        yield from _without_referee(history)
        return
    referee = Referee(history.scenario.rules)
    for number, step in enumerate(history.steps):
        if (wrong := referee.judge(step.at, step.event, step.effects)) is not None:
            yield f"step {number} at {step.at:.3f}, {step.event}: {wrong}"
            return  # later faults would follow from this one
    yield from _ends(history)
    yield from _durability(history, referee)
    yield from _fates(history, referee)
    yield from _written(history)
    yield from _waits(history)
    yield from _cohorts(history)
    yield from _best(history, referee)
    yield from _replay(history)
    yield from _workers(history)
    yield from _sessions(history)
    yield from faults_of_parts(history)


def _without_referee(history: History) -> Iterator[str]:
    for faults in (_ends, _written, _cohorts, _replay, _workers, _sessions, faults_of_parts, faults_of_budgets):
        yield from faults(history)


def check(history: History) -> None:
    """Check a history; raise AssertionError with all faults."""
    faults = list(faults_of(history))
    assert not faults, "\n".join(faults)


# ---------------------------------------------------------------- rounds and the run


def _ends(history: History) -> Iterator[str]:
    """Check invariant 8: every start and resume of the run ends exactly once."""
    ends = [(e.state, e.cause) for _, e in history.effects() if isinstance(e, server.EndRun)]
    assert history.machine is not None
    state = history.machine.ledger.state
    if not ends or state not in TERMINAL or state is not ends[-1][0]:
        yield f"the run is {state} after its ends {ends}"
    if not all(cause for _, cause in ends):
        yield f"a run ended without a cause: {ends}"


def _durability(history: History, referee: Referee) -> Iterator[str]:
    """Check invariant 2: an acknowledged update is on disk, and every later life of the coordinator knows it."""
    for acknowledged in history.acknowledged:
        if acknowledged.digest in referee.run.lost_on_disk:
            continue  # its operator has accepted that; another one may have come since
        accepted = referee.run.accepted.get((acknowledged.client_id, acknowledged.round_id))
        if accepted is None or accepted.update.digest != acknowledged.digest:
            yield f"acknowledged, but not on disk: {acknowledged}"
    for restart in history.restarts:
        for forgotten in (one for one in restart.forgotten if one.digest not in referee.run.lost_on_disk):
            yield f"forgotten by the coordinator that started at {restart.at}: {forgotten}"


def _fates(history: History, referee: Referee) -> Iterator[str]:
    """Check that the record on disk has the fate of every invitation that the referee has derived."""
    for round_id, facts in referee.run.rounds.items():
        record = history.records.get(round_id)
        if record is None:
            yield f"round {round_id} has ended, and no record of it is on disk"
            continue
        if (record.close_reason, record.abandon_reason) != (facts.close_reason, facts.abandon_reason):
            why = (record.close_reason, record.abandon_reason)
            yield f"round {round_id}: {why} where {(facts.close_reason, facts.abandon_reason)} is true"
        fates = {c: r.fate for c, r in record.clients.items()}
        if fates != facts.fates:
            yield f"round {round_id}: fates {fates} where {facts.fates} are true"
        for client_id, row in record.clients.items():
            if row.fate in (Fate.FAILED, Fate.REFUSED, Fate.LOST, Fate.LATE) and not row.reason:
                yield f"round {round_id}: {client_id} was {row.fate} without a reason"


def _written(history: History) -> Iterator[str]:
    """Check that the records on disk say of each update what the machine knew at last, which it has validated."""
    for round_id, known in history.known.items():
        record = history.records.get(round_id)
        if record is None or (written := facts_of(record)) != known:
            yield f"round {round_id}: the record on disk says {record and written} where {known} is true"


def _waits(history: History) -> Iterator[str]:
    """Check that the waits after failures are bounded, grow, and are those that the policy says."""
    policy = history.scenario.rules.policy
    is_resumed = any(isinstance(step.event, server.ResumeRequested) for step in history.steps)
    for step in history.steps:
        for effect in step.effects:
            wait = effect.not_before - step.at if isinstance(effect, server.OpenNextRound) else 0.0
            if wait > policy.retry_wait_max + EPSILON:
                yield f"at {step.at:.3f} the next round waits for {wait:.3f} s of {policy.retry_wait_max}"
    for record in history.records.values():
        if record.retry_at is not None and record.ended_at is not None:
            longest = min(policy.retry_wait_max, policy.retry_wait * 2 ** (max(1, record.retry) - 1))
            if not longest / 2 - EPSILON <= record.retry_at - record.ended_at <= longest + EPSILON:
                yield f"round {record.round_id} is repeated after {record.retry_at - record.ended_at:.3f} s"
        later = history.records.get(RoundId(record.round_id + 1))
        if (
            record.retry_at is not None
            and later is not None
            and not is_resumed
            and later.opened_at < record.retry_at - EPSILON
        ):
            yield f"round {later.round_id} began {record.retry_at - later.opened_at:.3f} s too early"
        for client_id, row in record.clients.items():
            most = min(policy.failure_rest_max, policy.failure_rest * 2**30)
            if row.rest and not policy.failure_rest / 2 - EPSILON <= row.rest <= most + EPSILON:
                yield f"round {record.round_id}: {client_id} rests for {row.rest:.3f} s"


def _cohorts(history: History) -> Iterator[str]:
    """Check that the same seed and the same candidates give the same cohort, also after a restart."""
    scenario, sampler = history.scenario, history.scenario.cohort.build()
    requests: dict[RoundId, server.DrawCohort] = {}
    for step in history.steps:
        if isinstance(step.event, server.CohortDrawn):
            request = requests[step.event.round_id]
            again = draw(
                sampler,
                seed=scenario.rules.seed,
                round_id=request.round_id,
                number=request.number,
                count=request.count,
                candidates=tuple(reversed(request.candidates)),
                relaxed=request.relaxed,
            )
            if step.event.clients != again:
                yield f"round {request.round_id}: drawn {step.event.clients}, and {again} from the same candidates"
        for effect in step.effects:
            if isinstance(effect, server.DrawCohort):
                requests[effect.round_id] = effect


def _best(history: History, referee: Referee) -> Iterator[str]:
    """Check that the version that stays as the best one is the first with the best of all values."""
    assert history.machine is not None
    noted = history.machine.ledger.best
    found = None if noted is None else (noted.version, noted.value)
    if found != referee.measures.best:
        yield f"the best version is {found} in the ledger, and {referee.measures.best} by its values"


def _replay(history: History) -> Iterator[str]:
    """Check that a replay of the journal reproduces every effect, from the start and from a snapshot."""
    assert history.machine is not None
    receive = inspect.unwrap(RunMachine.receive)  # the states were validated when they came
    whole = RunMachine(history.scenario.rules)
    for number, step in enumerate(history.steps):
        if receive(whole, step.event, step.at) != step.effects:
            yield f"step {number}, {step.event}, replays to other effects"
            return
    done, ledger = history.snapshot()
    short = RunMachine(history.scenario.rules, ledger)
    for step in history.steps[done:]:
        if receive(short, step.event, step.at) != step.effects:
            yield f"{step.event} replays to other effects from the snapshot"
            return
    if not whole.ledger == short.ledger == history.machine.ledger:
        yield "the replayed ledgers differ from the one in memory"


# ---------------------------------------------------------------- agents


def _workers(history: History) -> Iterator[str]:
    """Check invariant 8: a worker may outlive its deadline by its lease, and is killed only then."""
    lease = history.scenario.client_lease
    late = lease + history.scenario.faults.lag + EPSILON
    for end in history.worker_ends:
        if end.at > end.deadline + late:
            yield f"{end.client_id}'s worker outlived its deadline {end.deadline:.3f} until {end.at:.3f}"
        since = min(end.deadline, end.deadline if end.stopped_at is None else end.stopped_at)
        if end.was_killed and end.at < since + lease - EPSILON:
            yield f"{end.client_id}'s worker was killed at {end.at:.3f}, its lease runs from {since:.3f}"


def _sessions(history: History) -> Iterator[str]:
    if history.left_in_spool:
        yield f"neither answered nor discarded after the end: {history.left_in_spool}"
    patience = SessionRules(tasks=frozenset()).reconnect_max + history.scenario.faults.lag + EPSILON
    watches = {step.client_id: _Watch(history.scenario.client_lease, patience) for step in history.agent_steps}
    for step in history.agent_steps:
        watch = watches[step.client_id]
        yield from _downloads(step, watch)
        yield from _uploads(step, watch)
        yield from _reports(step, watch)
        if isinstance(step.event, client.Disconnected | client.Connected | client.UploadCut) and _stops_work(step):
            yield f"{step.client_id} stopped its work because of {step.event}"


@dataclass(slots=True)
class _Watch:
    """The requests that one agent has received, and its uploads that must be repeated."""

    lease: float
    patience: float  # the time until a cut upload must be repeated
    released: set[RoundId] = field(default_factory=set)
    wanted: set[client.Key] = field(default_factory=set)  # jobs requested on the present stream
    connected_at: float | None = None
    cut: dict[client.Key, float] = field(default_factory=dict)


def _stops_work(step: AgentStep) -> bool:
    """Return whether work was stopped that was not overdue (overdue work is reported)."""
    kinds = {type(effect) for effect in step.effects}
    return client.StopWork in kinds and not kinds & {client.ReportFailure, client.ReportEvaluation}


def _downloads(step: AgentStep, watch: _Watch) -> Iterator[str]:
    """Check that a job begins only while it is wanted, and that a download is given up only if it is unwanted."""
    since = step.at if watch.connected_at is None else watch.connected_at
    is_early = isinstance(step.event, client.TimePassed) and step.at < since + watch.lease - EPSILON
    for effect in step.effects:
        if is_early and isinstance(effect, client.StopWork) and effect.key not in watch.wanted:
            yield f"{step.client_id} gave up {effect.key} at {step.at:.3f} before it knew whether it is wanted"
    match step.event:
        case client.Connected():
            watch.connected_at = step.at
        case client.Asked(request):
            watch.wanted.add(request.key)
        case client.Released(run_id, round_id):
            watch.wanted.discard(("round", run_id, round_id))
        case client.Disconnected():
            watch.wanted.clear()
            watch.connected_at = None
    for effect in step.effects:
        if isinstance(effect, client.Download) and effect.request.key not in watch.wanted:
            yield f"{step.client_id} begins {effect.request.key} at {step.at:.3f}, which is not wanted any more"


def _uploads(step: AgentStep, watch: _Watch) -> Iterator[str]:
    """Check that a cut upload is repeated while the agent is connected."""
    if isinstance(step.event, client.Disconnected):
        watch.cut.clear()  # all are repeated on the next stream
    for key, at in watch.cut.items():
        if step.at > at + watch.patience:
            yield f"{step.client_id}: the upload of {key} was cut at {at:.3f} and not repeated by {step.at:.3f}"
    for effect in step.effects:
        if isinstance(effect, client.Upload | client.Discard):
            watch.cut.pop(effect.key, None)
    if isinstance(step.event, client.UploadCut) and watch.connected_at is not None:
        watch.cut[step.event.key] = step.at


def _reports(step: AgentStep, watch: _Watch) -> Iterator[str]:
    """Check that no failure is reported for a round after its release, except that of an upload that was wanted."""
    if isinstance(step.event, client.Forbidden):
        return  # it answers a request, which may be one from before the release
    for effect in step.effects:
        if not isinstance(effect, client.ReportFailure) or effect.reason is FailureReason.UPLOAD_FAILED:
            continue
        if effect.round_id in watch.released:
            yield f"{step.client_id} reported {effect.reason} for round {effect.round_id} after its release"
    match step.event:
        case client.Released(_, round_id):
            watch.released.add(round_id)
        case client.Asked(client.Invitation(round_id=round_id)):
            watch.released.discard(round_id)
