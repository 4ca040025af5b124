"""A simulated coordinator process around the real run machine, with its disk, its group commits and its crashes."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from atoll.client.session import events as client
from atoll.ground.printable import count_of
from atoll.protocol.identity.clock_hint import SKEW_S
from atoll.protocol.vocabulary import ClientId, Digest, RejectReason, RunState
from atoll.server.clock import JUMP_S, ClockComparison, MonotoneClock, Reading, fault_at_start, next_instant
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AskEvaluation,
    CohortDrawn,
    Commit,
    ComputeMetrics,
    CoordinatorStarted,
    DiskFree,
    DiskShort,
    DrawCohort,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    FilesLost,
    Invite,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    PauseRequested,
    PauseRun,
    Release,
    ResumeRequested,
    ResumeRun,
    RoundDue,
    RunStarted,
    SamplerFailed,
    StopRequested,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.session_events import OpenSum, TellMember
from tests.histories.control_streams import RUN, ControlStreams
from tests.histories.disk import Disk, Posted, Reply, Snapshot, records_of
from tests.histories.history import Acknowledged, Restart, Step, facts_of
from tests.histories.network import StreamAgent
from tests.histories.parts import KeptParts
from tests.histories.referee.measure_referee import values_of
from tests.histories.scenario import TASK
from tests.histories.scheduling import World
from tests.histories.sums import Sums, told_of
from tests.histories.wall_clocks import WallClock

RESUMABLE = (RunState.STOPPED, RunState.FAILED)
STEP_CRASHES_MAX = 6
DISK_RETRY_S = 1.0
LOOK_S = 30.0
"""Interval at which the clocks are compared [s]."""


class CoordinatorWorld(World, Protocol):
    """The world around the coordinator."""

    sums: Sums
    """The members, masks and openings of its secure sums."""

    def drawn(self, effect: DrawCohort) -> tuple[ClientId, ...]:
        """Draw a cohort by the deployed sampler."""

    def cut_uploads(self) -> None:
        """Break every upload, because the coordinator has crashed."""

    def run_paused(self) -> None:
        """Take note of a pause of the run."""

    def run_ended(self) -> None:
        """Take note of the end of the run."""


class SimulatedCoordinator:
    """The coordinator process; `life` counts its crashes, each of which cancels all planned actions.

    Its deadlines are by `clock`, the deployed one; what it signs is by `wall`, the clock of its machine.
    """

    slept = wakes_at = 0.0

    def __init__(self, world: CoordinatorWorld) -> None:
        self.world = world
        self.life = 0
        self.is_up = False
        self.disk = Disk()
        self.parts = KeptParts(world)
        self.wall = WallClock(world, random.Random(f"wall clock {world.history.seed}"))
        self._people = random.Random(f"clocks {world.history.seed}")
        self._boot, self._signed_us = 1, 0
        self._noted: Reading | None = None
        self._is_accepted = False
        self.num_step_crashes = 0
        self._no_room_until = 0.0
        self._alive_at = 0.0  # the time on its own clock that it has recorded last
        self._forget()

    def _forget(self) -> None:
        self.machine: RunMachine | None = None
        self.streams = ControlStreams(self.world, self)
        self._timer: float | None = None
        self._seq = len(self.disk.entries)
        self._posted: list[Posted] = []
        self._is_writing = False
        self._folding: Aggregate | None = None
        self._duties = 0  # draws, folds, evaluations and pauses of this process that have not ended

    @property
    def is_at_rest(self) -> bool:
        """Return whether the process is up and all of its decisions are on disk."""
        return self.is_up and not self._is_writing

    @property
    def now(self) -> float:
        """The time on its own clock."""
        return self.clock.now()

    @property
    def running(self) -> RunMachine:
        """The run machine, while the process is up."""
        assert self.machine is not None
        return self.machine

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Start the process, for the first time or again."""
        if self._is_refused():
            return
        self._watch_clocks()
        self.clock = MonotoneClock(self.disk.last_instant(), wall=self.wall.now, monotonic=lambda: self.world.now)
        self.is_up = True
        if self.disk.entries:
            self._recover()
        else:
            self.machine = RunMachine(self.world.scenario.rules)
            self.post(RunStarted(Digest("v0")))

    def _recover(self) -> None:
        world, disk = self.world, self.disk
        self.machine, from_snapshot = disk.rebuilt(world.scenario.rules)
        self.clock.advance_to(self.machine.ledger.now)
        forgotten = tuple(a for a in world.history.acknowledged if not self._knows(a))
        world.history.restarts.append(Restart(world.now, len(disk.entries), forgotten))
        world.remark(
            "coordinator",
            f"is up again with {count_of(len(disk.entries), 'entry', 'entries')}, {from_snapshot} in the snapshot",
        )
        if self.machine.ledger.is_open:
            self.post(CoordinatorStarted(self._alive_at))
            self._lose_files()
            for client_id in self.machine.ledger.membership.members:
                self.streams.heard_from(client_id)
            if self.machine.ledger.state is RunState.PAUSED:
                self.world.run_paused()
        else:
            world.run_ended()

    def _lose_files(self) -> None:
        """Go on without accepted updates that were lost in the crash; which, is drawn apart from the world."""
        held = sorted(Keep.after(0, self.running, self.running.rules.policy).updates)
        if not held or not self.world.happens("lost_files"):
            return
        rng = random.Random(f"lost {self.world.scenario.rules.seed} {len(self.disk.entries)}")
        lost = rng.sample(held, rng.randint(1, len(held)))
        self.world.remark("coordinator", f"{', '.join(lost)} are lost on its disk")
        for digest in lost:
            self.parts.lost(digest)
        self.post(FilesLost(tuple(sorted(lost)), detail="the file is missing"))

    def _knows(self, acknowledged: Acknowledged) -> bool:
        assert self.machine is not None
        record = self.machine.record_of(acknowledged.round_id)
        return record is None or record.clients[acknowledged.client_id].digest == acknowledged.digest

    def crash(self, where: str) -> bool:
        """Crash the process, with the loss of everything that is not on disk; return False if it is not up."""
        if not self.is_up:
            return False
        world = self.world
        lost = [type(posted.step.event).__name__ for posted in self._posted]
        world.remark("coordinator", f"CRASHES {where}; not on disk: {', '.join(lost) or 'nothing'}")
        self._alive_at = self.now - world.rng.uniform(0, 0.5)
        self._noted = self._reading()
        self._boot += self._people.random() < 0.5
        self.life += 1
        self.is_up = False
        self.streams.break_all()
        world.cut_uploads()
        self.parts.crashed()
        self._forget()
        self._meanwhile()
        world.after(world.rng.expovariate(1 / world.scenario.faults.downtime), self.start)
        return True

    def _meanwhile(self) -> None:
        """Draw the faults of disk and clock that happen while the process is down."""
        world, rng = self.world, self.world.rng
        if world.happens("damaged_snapshots") and self.disk.damage_newest():
            world.remark("coordinator", "the newest snapshot is damaged")
        if world.happens("clock_jumps"):
            by = rng.uniform(-1, 1) * world.scenario.faults.clock_jump
            world.remark("coordinator", f"its wall clock is set by {by:+.1f} s")
            self.wall.set(self.wall.error + by)
            self.wall.jumps += 1
            world.after(self._people.expovariate(1 / world.scenario.faults.clock_wrong), self.wall.set)

    # ------------------------------------------------------------ clocks

    def _reading(self) -> Reading:
        return Reading(self.wall.now(), self.world.now, str(self._boot))

    def _is_refused(self) -> bool:
        """Return whether this start is refused for its clock, which the operator sets or accepts after a while."""
        fault = "" if self._noted is None else fault_at_start(self._noted, self._reading())
        if fault and not self._is_accepted:
            self.world.remark("coordinator", f"is not started: {fault}")
            self._is_accepted = self._people.random() < 0.5
            if not self._is_accepted:
                self.wall.set()
            self.world.after(self._people.expovariate(1 / 30), self.start)
            return True
        self._is_accepted = False
        return False

    def _watch_clocks(self) -> None:
        """Compare the clocks now and from time to time: a jump of the wall clock is told, within a look."""
        begun = self._reading()
        comparison, told = ClockComparison(begun), 0.0

        def look() -> None:
            nonlocal told
            now = self._noted = self._reading()
            if by := comparison.jump(now):
                told += by
                self.world.remark("coordinator", f"notices that its clock was set by {by:+.1f} s")
                self.streams.dismiss_wrong_clocks()
            if abs(now.true - begun.true - (now.uptime - begun.uptime) - told) >= JUMP_S:
                self.world.fail(f"the clock jumped, and {told:+.1f} s of it are told")
            self.world.after(LOOK_S, look, self)

        if self.world.scenario.faults.clock_gap:
            self.world.after(LOOK_S, look, self)

    def takes_clock_of(self, agent: StreamAgent) -> bool:
        """Return whether the clock of a client allows signed messages."""
        return abs(agent.wall.now() - self.wall.now()) <= SKEW_S

    def next_instant(self) -> int:
        """Return the instant of a signature [us], by the deployed rule."""
        self._signed_us = next_instant(self._signed_us, int(self.wall.now() * 1e6))
        return self._signed_us

    def _dies_at(self, where: str) -> bool:
        if self.num_step_crashes >= STEP_CRASHES_MAX or not self.world.happens("crash_at_step"):
            return False
        self.num_step_crashes += 1
        return self.crash(where)

    # ------------------------------------------------------------ events in

    def post(self, event: Event, reply: Reply | None = None) -> None:
        """Let the machine receive an event; write it to disk, then execute its effects."""
        world, machine, now = self.world, self.running, self.now
        effects = machine.receive(event, now)
        world.history.known |= {round_id: facts_of(record) for round_id, record in machine.ledger.past.items()}
        ends = any(isinstance(e, Commit | Abandon | PauseRun | EndRun) for e in effects)
        self._seq += 1
        snapshot = Snapshot.of(machine, self._seq) if ends and machine.may_snapshot else None
        self._posted.append(
            Posted(Step(now, event, effects, self.world.now), snapshot, records_of(effects, machine), reply)
        )
        if not self._is_writing:
            self._is_writing = True
            self.world.after(0.0, self._write, self)
        self._arm_timer()

    def _arm_timer(self) -> None:
        deadline = self.running.deadline
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.world.after(self.world.wait(deadline - self.now), self._timer_fired, self)

    def _timer_fired(self) -> None:
        self._timer = None
        deadline = self.running.deadline
        if deadline is not None and self.now >= deadline:
            self.post(TimePassed())
        else:
            self._arm_timer()

    # ------------------------------------------------------------ onto the disk

    @property
    def _is_disk_full(self) -> bool:
        return self.world.now < self._no_room_until

    def fill_disk(self, until: float) -> bool:
        """Leave no room on the disk until a time."""
        self.world.remark("coordinator", f"its disk is full until {until:.3f}")
        self._no_room_until = max(until, self._no_room_until)
        return True

    def has_room(self) -> bool:
        """Return whether the disk has room for an update."""
        return not self._is_disk_full

    def refuses_for_room(self) -> None:
        """Note that an upload does not fit: the run waits until there is room, as the run driver lets it."""
        if self.running.ledger.is_open and self.running.ledger.short_since is None:
            self.post(DiskShort("an update does not fit"))
            self.world.after(DISK_RETRY_S, self._look_for_room, self)

    def _look_for_room(self) -> None:
        if self._is_disk_full:
            self.world.after(DISK_RETRY_S, self._look_for_room, self)
        else:
            self.post(DiskFree())

    def _write(self) -> None:
        if self._dies_at("before a write"):
            return
        batch, self._posted = self._posted, []
        self._commit(batch)

    def _commit(self, batch: list[Posted]) -> None:
        """Write a batch; while the disk is full, wait and retry, as the run driver does."""
        if self._is_disk_full:
            self.world.after(DISK_RETRY_S, lambda: self._commit(batch), self)
            return
        world = self.world
        seconds = world.rng.uniform(0.5, 1.5) * world.scenario.write
        if world.happens("slow_writes"):
            seconds += world.rng.expovariate(1 / world.scenario.faults.slow_write)
        world.after(seconds, lambda: self._written(batch), self)

    def _written(self, batch: list[Posted]) -> None:
        if self._is_disk_full:  # no part of the batch was written
            self._commit(batch)
            return
        if self._dies_at(f"while it writes {[type(p.step.event).__name__ for p in batch]}"):
            return
        self.disk.write(batch)
        self.world.history.steps += [posted.step for posted in batch]
        life = self.life
        for posted in batch:
            for effect in posted.step.effects:
                if self._dies_at(f"before it performs {type(effect).__name__}"):
                    return
                self._act(effect)
            if posted.reply is not None and not self._dies_at("before it answers"):
                posted.reply(posted.step.effects)
            if self.life != life:
                return
        self._is_writing = bool(self._posted)
        if self._is_writing:
            self.world.after(0.0, self._write, self)
        else:
            self._check_that_something_is_awaited()

    def _check_that_something_is_awaited(self) -> None:
        machine = self.running
        if machine.ledger.state is not RunState.RUNNING:
            return
        is_waiting_for_clients = machine.round is None and machine.ledger.evaluation is not None
        if machine.deadline is None and not self._duties and not is_waiting_for_clients:
            self.world.fail("the run hangs: no deadline, and no work in progress")
        if machine.round is not None and len(machine.round.record.clients) <= 100:
            for client_id in self.streams.unwatched(machine.round.record, machine.ledger.training):
                self.world.fail(f"round {machine.round.record.round_id} waits for {client_id}, which has no lease")

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        now = self.now
        match effect:
            case Invite(client_id, round_id, base, deadline):
                invitation = client.Invitation(RUN, round_id, TASK, base, Digest(f"v{base}"), max(0.0, deadline - now))
                invitation = replace(invitation, secure=self.world.sums.terms(effect))
                self.streams.send(client_id, client.Asked(invitation))
            case Release(client_id, round_id, reason, submit):
                self.streams.send(client_id, client.Released(RUN, round_id, reason, submit))
            case AskEvaluation(client_id, version, deadline):
                request = client.EvaluationRequest(RUN, version, TASK, Digest(f"v{version}"), max(0.0, deadline - now))
                self.streams.send(client_id, client.Asked(request))
            case DrawCohort():
                self._later(self.world.scenario.draw, lambda: self._draw(effect))
            case Aggregate():
                self._folding = effect
                self._later(self.world.scenario.fold, lambda: self._fold(effect))
            case OpenNextRound(not_before):
                self._later(self.world.scenario.pause, self._open_next_round, at_least=not_before - now)
            case PauseRun():
                self.world.run_paused()
            case ResumeRun():
                self._later(0.5, self._resume_by_itself)
            case EndRun():
                self.streams.send_to_all(client.RunEnded(RUN))
                self.world.run_ended()
            case _:
                self._measure(effect)

    def _measure(self, effect: Effect) -> None:
        match effect:
            case Abandon():
                self._folding = None
            case EvaluateModel(version):
                sums = self.world.scenario.sums_of(version)
                self._later(1.0, lambda: self.post(ModelEvaluated(version, sums)))
            case TellMember(client_id):
                self.streams.send(client_id, told_of(effect))
            case OpenSum():
                self._later(1.0, lambda: self.post(self.world.sums.opening(effect)))
            case ComputeMetrics(version, source, statistics):
                values = values_of(statistics)
                self._later(1.0, lambda: self.post(MetricsComputed(version, source, values)))
            case _:
                pass

    def _later(self, seconds: float, action: Callable[[], None], *, at_least: float = 0.0) -> None:
        """Plan an action of this process, which counts as a duty until it happens."""
        self._duties += 1

        def act() -> None:
            self._duties -= 1
            action()

        self.world.after(max(at_least, seconds * self.world.rng.uniform(0.5, 1.5)), act, self)

    def _open_next_round(self) -> None:
        if self.running.ledger.state is RunState.RUNNING:
            self.post(RoundDue())

    def _draw(self, effect: DrawCohort) -> None:
        if self.world.happens("sampler_fails"):
            self.post(SamplerFailed(effect.round_id, "the user's sampler raised"))
            return
        self.post(CohortDrawn(effect.round_id, self.world.drawn(effect)))

    def _fold(self, effect: Aggregate) -> None:
        if effect is not self._folding:
            return  # the round goes on without an update that is lost, as the run driver lets it
        if self._is_disk_full:
            self._later(DISK_RETRY_S, lambda: self._fold(effect))
            return
        if self.world.happens("fold_fails"):
            self.post(AggregationFailed(effect.round_id, "out of memory"))
            return
        self.world.sums.check_fold(effect)
        text = repr((effect.base_version, effect.contributions))
        ranges = (0,) if self.running.rules.secure is not None else ()
        self.post(Aggregated(effect.round_id, Digest(hashlib.sha256(text.encode()).hexdigest()), ranges=ranges))

    # ------------------------------------------------------------ uploads

    def upload_begun(self, update: Update) -> None:
        """Take note of an upload's first bytes."""
        self.post(UploadBegun(update.client_id, update.round_id))

    def update_arrived(self, update: Update, reply: Reply | None) -> None:
        """Receive an update whose bytes are complete, checked and on disk."""
        self.post(UpdateReceived(update), reply)

    def part_kept(self) -> bool:
        """Return whether the process dies just after it has made a part durable."""
        return self._dies_at("when a part is kept")

    def update_refused(self, update: Update, reason: RejectReason, reply: Reply) -> None:
        """Refuse an update whose bytes or manifest are bad."""
        self.post(UpdateRefused(update.client_id, update.round_id, reason, "bad bytes"), reply)

    def acknowledged(self, effect: Accept) -> None:
        """Record that an acceptance is sent."""
        acknowledged = Acknowledged(self.world.now, effect.client_id, effect.round_id, effect.digest)
        self.world.history.acknowledged.append(acknowledged)

    # ------------------------------------------------------------ the operator

    def stop_run(self) -> bool:
        """Stop the run on the operator's command; return False if it is not open."""
        if not self.running.ledger.is_open:
            return False
        self.post(StopRequested("the operator wants it"))
        return True

    def pause_run(self) -> bool:
        """Pause the run on the operator's command; return False if it is not running."""
        if self.running.ledger.state is not RunState.RUNNING:
            return False
        self.post(PauseRequested("the operator wants it"))
        return True

    @property
    def is_paused(self) -> bool:
        """Return whether the run is paused, has a request to pause, or is queued."""
        ledger = self.running.ledger
        return ledger.is_open and (ledger.state is not RunState.RUNNING or ledger.pause_reason is not None)

    def unpause_run(self, *, wait: bool) -> None:
        """Resume a paused run, on the operator's command or from the queue; its clients are still known."""
        self.post(ResumeRequested(wait))

    def _resume_by_itself(self) -> None:
        """Resume a run that has waited in vain for clients which are back."""
        if self.is_paused and self.running.ledger.resumes_itself:
            self.post(ResumeRequested())

    def resume_run(self) -> None:
        """Reopen an ended run on the operator's command, and introduce the connected clients."""
        if self.running.ledger.state not in RESUMABLE:
            return
        self.post(ResumeRequested())
        for joined in self.streams.introductions():
            self.post(joined)

    def final_records(self) -> None:
        """Copy the records on disk into the history."""
        self.world.history.records = self.disk.decoded_records()
        self.world.history.snapshot = self.disk.ledger
