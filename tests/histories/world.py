"""A world in one process: the run machine of a coordinator and the sessions of clients, in virtual time, with faults.

There is one heap of (time, sequence, action) and one seed: the same seed gives the same history.

    history = World(seed, random_scenario(seed)).run()

    python -m tests.histories --faults standard --seed 17      # shows the history of one seed
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, FailureReason, RoundId, Version
from atoll.server.rounds.events import ClientEvaluated, ClientFailed, DrawCohort, Update, UpdateReceived, UploadBegun
from atoll.server.selection.sampling import draw
from tests.histories.agent import SimulatedAgent
from tests.histories.coordinator import RESUMABLE, SimulatedCoordinator
from tests.histories.faults import Seconds
from tests.histories.history import History, Remark
from tests.histories.scenario import Scenario
from tests.histories.scheduling import Endpoint
from tests.histories.sums import Sums
from tests.histories.wall_clocks import WallClock
from tests.validation import validate_machines

validate_machines()

BEGIN = 1000.0
"""Time at which a world begins [s]."""
ACTIONS_MAX = 100_000
"""Maximum number of actions, for each agent."""
MOMENT = 1e-6
"""Shortest wait [s]; a shorter one could vanish when it is added to a time."""
PAUSES_MAX = 3
"""Number of times that the operator resumes a run that its own policy has paused; then the operator stops it."""
ABSENCES_MAX = 2
"""Number of times that a client is away for hours: a quorum must be there at the same time in the end."""
WRONG_CLOCKS_MAX = 4
"""Number of times that the clock of a machine goes wrong."""
DRAIN = 3000.0
"""Seconds after the end of the run within which every agent must be idle."""


class Violation(AssertionError):
    """An event in a world that must never happen."""


class World:
    """A world with its processes, its time and its chance, as the module describes."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed, self.scenario = seed, scenario
        self.rng = random.Random(f"world {seed}")
        self._sampler = scenario.cohort.build()
        self.now = BEGIN
        self.history = History(seed, scenario)
        self._heap: list[tuple[float, int, Endpoint | None, int, float, Callable[[], None]]] = []
        self._sequence = 0
        self._ended_at: float | None = None
        self._is_resume_planned = False
        self._resumes_left = scenario.faults.resumes
        self._pauses_left = PAUSES_MAX
        self._is_unpause_planned = False
        chances = {part.name: getattr(scenario.faults, part.name) for part in fields(scenario.faults)}
        self._chances: dict[str, float] = {name: chance for name, chance in chances.items() if chance}
        names = [ClientId(f"c{number:02}") for number in range(scenario.num_clients)]
        self.sums = Sums(self, names if scenario.rules.secure is not None else [])
        self.coordinator = SimulatedCoordinator(self)
        self.agents = {
            name: SimulatedAgent(self, self.coordinator, name, random.Random(f"{seed} {name}")) for name in names
        }

    # ------------------------------------------------------------ time

    def at(self, when: float, action: Callable[[], None], owner: Endpoint | None = None) -> None:
        """Plan an action; it is dropped if its owner dies before, and delayed by its owner's sleep."""
        self._sequence += 1
        life, slept = 0, 0.0
        if owner is not None:
            life, slept, when = owner.life, owner.slept, max(when, owner.wakes_at)
        # the sequence is unique, so that later elements are never compared
        heapq.heappush(self._heap, (when, self._sequence, owner, life, slept, action))

    def after(self, seconds: float, action: Callable[[], None], owner: Endpoint | None = None) -> None:
        """Plan an action in `seconds`."""
        self.at(self.now + seconds, action, owner)

    def run(self) -> History:
        """Run all actions until the run is over and every agent is idle; return the history."""
        self.coordinator.start()
        for agent in self.agents.values():
            self.after(self.rng.expovariate(1 / 3), agent.start, agent)
            self._plan_approval(agent)
        self._plan_faults()
        while self._ended_at is None or not self._is_over():
            if not self._heap:
                self.fail("the world hangs: nothing is pending")
            when, sequence, owner, life, slept, action = heapq.heappop(self._heap)
            if sequence > ACTIONS_MAX * len(self.agents):
                self.fail(f"the world does not end: {sequence} actions")
            if owner is None or (owner.life == life and owner.slept == slept):
                if when > self.now:
                    self.now = when
                action()
            elif owner.life == life:  # the owner's clock stood still meanwhile
                self.at(when + owner.slept - slept, action, owner)
        self._close_history()
        return self.history

    def _is_over(self) -> bool:
        if self._ended_at is None or not self.coordinator.is_at_rest:
            return False
        if self.coordinator.running.ledger.state not in TERMINAL:
            return False
        return all(agent.is_idle for agent in self.agents.values()) or self.now > self._ended_at + DRAIN

    def _close_history(self) -> None:
        history = self.history
        history.ended_at, history.machine = self.now, self.coordinator.running
        for agent in self.agents.values():
            history.left_in_spool += [(agent.client_id, key) for key in agent.spool]
            if not history.faults["dropped"] + history.faults["repeated"]:  # it hears of the end when it connects again
                history.left_in_spool += [(agent.client_id, key) for key in agent.sums.encoded]
        self.sums.check_promises()
        self.coordinator.final_records()

    def fail(self, why: str) -> None:
        """Fail the history, because of an event that must never happen."""
        raise Violation(why)

    def remark(self, who: str, what: str) -> None:
        """Write a line for the reader of the history."""
        self.history.remarks.append(Remark(self.now, who, what))

    # ------------------------------------------------------------ chance

    def happens(self, fault: str, share: float = 1.0) -> bool:
        """Draw whether a fault happens, by the name of its field; a chance of 0 does not use the generator."""
        chance = self._chances.get(fault)
        if chance is None or self._ended_at is not None or self.rng.random() >= chance * share:
            return False
        self.history.faults[fault] += 1
        return True

    @property
    def _is_troubled(self) -> bool:
        """Return whether faults may still happen; they end with the run, so that the world can end."""
        return self._ended_at is None

    def latency(self) -> float:
        """Draw the time of one way through the network [s]."""
        return self.scenario.latency * self.rng.lognormvariate(0, 0.7)

    def wait(self, seconds: float) -> float:
        """Draw the real duration of a wait of `seconds` [s]: at least `MOMENT`, and up to `lag` too long."""
        most = self.scenario.faults.lag
        return max(MOMENT if seconds > 0 else 0.0, seconds) + (self.rng.uniform(0, most) if most else 0.0)

    def drawn(self, effect: DrawCohort) -> tuple[ClientId, ...]:
        """Draw a cohort by the deployed sampler."""
        return draw(
            self._sampler,
            seed=self.scenario.rules.seed,
            round_id=effect.round_id,
            count=effect.count,
            candidates=effect.candidates,
            number=effect.number,
            relaxed=effect.relaxed,
        )

    # ------------------------------------------------------------ faults

    def _plan_faults(self) -> None:
        faults = self.scenario.faults
        crashes = faults.coordinator_crashes
        self._repeat("coordinator_crashes", self._crash_coordinator, faults.coordinator_crash_gap, crashes)
        for agent in self.agents.values():
            self._repeat("agent_crash_gap", agent.crash, faults.agent_crash_gap)
            self._repeat("leave_gap", agent.leave, faults.leave_gap)
            self._repeat("cut_gap", partial(self._cut, agent), faults.cut_gap)
            self._repeat("suspend_gap", partial(self._suspend, agent), faults.suspend_gap)
            self._plan_absences(agent)
            self._plan_wrong_clocks(agent.client_id, agent.wall)
        self._plan_wrong_clocks("coordinator", self.coordinator.wall)
        self._repeat("partition_gap", self._partition, faults.partition_gap)
        self._repeat("full_disk_gap", self._fill_disk, faults.full_disk_gap)
        self._repeat("strangers", self._stranger, 15.0, faults.strangers)
        self._repeat("pauses", self._pause_run, faults.operator_gap, faults.pauses)
        self._repeat("stops", self._stop_run, faults.operator_gap, faults.stops)

    def _repeat(self, fault: str, action: Callable[[], bool], gap: Seconds, times: int = 50) -> None:
        """Plan a fault as a Poisson process that ends with the run; the action returns whether the fault happened."""
        if not gap or not times:
            return

        def happen() -> None:
            if self._is_troubled:
                self.history.faults[fault] += action()
                self._repeat(fault, action, gap, times - 1)

        self.after(self.rng.expovariate(1 / gap), happen)

    def _crash_coordinator(self) -> bool:
        return self.coordinator.crash("at a random instant")

    def _cut(self, agent: SimulatedAgent) -> bool:
        if agent.connection is None:
            return False
        is_half_open = self.happens("half_open")
        self.remark(agent.client_id, "loses its stream" + (", unnoticed" if is_half_open else ""))
        agent.connection.cut(half_open=is_half_open)
        if self.scenario.faults.offline:
            agent.offline_until = self.now + self.rng.expovariate(1 / self.scenario.faults.offline)
        return True

    def _suspend(self, agent: SimulatedAgent) -> bool:
        if agent.wakes_at > self.now:
            return False
        seconds = self.rng.expovariate(1 / self.scenario.faults.suspend)
        self.remark(agent.client_id, f"sleeps for {seconds:.1f} s")
        agent.suspend(seconds)
        return True

    def _partition(self) -> bool:
        """Cut a group of clients off, in both directions or in one."""
        rng, faults = self.rng, self.scenario.faults
        group = rng.sample([*self.agents.values()], rng.randint(1, len(self.agents)))
        until = self.now + rng.expovariate(1 / faults.partition)
        way = rng.choice(["to the coordinator", "to the clients"]) if self.happens("one_way") else "both ways"
        names = ", ".join(sorted(agent.client_id for agent in group))
        self.remark("network", f"separates {names} from the coordinator, {way}, until {until:.3f}")
        for agent in group:
            agent.offline_until = max(agent.offline_until, until)
            if agent.connection is not None:
                agent.connection.block(
                    until, to_agent=way != "to the coordinator", to_coordinator=way != "to the clients"
                )
        return True

    def _fill_disk(self) -> bool:
        until = self.now + self.rng.expovariate(1 / self.scenario.faults.full_disk)
        return self.coordinator.fill_disk(until)

    def cut_uploads(self) -> None:
        """Break every upload, because the coordinator has crashed."""
        for agent in self.agents.values():
            for upload in agent.uploads.values():
                upload.cut()

    def _stop_run(self) -> bool:
        return self.coordinator.is_up and self.coordinator.stop_run()

    def _pause_run(self) -> bool:
        if not (self.coordinator.is_up and self.coordinator.pause_run()):
            return False
        self.after(self.rng.expovariate(1 / self.scenario.faults.operator_gap), self._unpause)
        return True

    def _unpause(self) -> None:
        """Resume the run, and repeat the request until it succeeds: other runs and crashes may prevent it."""
        if self.coordinator.is_at_rest:
            if not self.coordinator.is_paused:
                return
            self.coordinator.unpause_run(wait=self.rng.random() < 0.3)
        self.after(self.rng.expovariate(1 / 10), self._unpause)

    def run_paused(self) -> None:
        """Take note of a pause: the operator resumes a run that its own policy has paused, a few times."""
        rules = self.scenario.rules
        pauses_itself = rules.policy.on_failure == "pause" or rules.watched or rules.wait
        if not pauses_itself or self._is_unpause_planned:
            return
        self._is_unpause_planned = True
        self._pauses_left -= 1
        self.remark("operator", "sees that the run's own policy has paused it")
        self.after(self.rng.expovariate(1 / self.scenario.faults.operator_gap), self._end_pause)

    def _end_pause(self) -> None:
        """Resume or stop a paused run, when the coordinator is up."""
        if not self.coordinator.is_at_rest:
            self.after(1.0, self._end_pause)
            return
        self._is_unpause_planned = False
        if self._pauses_left < 0:
            self.coordinator.stop_run()
        elif self.coordinator.is_paused:
            self.coordinator.unpause_run(wait=False)

    def _plan_approval(self, agent: SimulatedAgent) -> None:
        """Let an agent wait for its operator's approval, by chances of its own: those of the world stay."""
        rng, faults = random.Random(f"approval {self.seed} {agent.client_id}"), self.scenario.faults
        if rng.random() < faults.approvals:
            agent.approved_at = BEGIN + rng.expovariate(1 / faults.approval)
            self.at(agent.approved_at, agent.approved)

    def _plan_absences(self, agent: SimulatedAgent) -> None:
        """Let an agent be away for hours, by chances of its own: those of the world stay."""
        rng, faults = random.Random(f"absence {self.seed} {agent.client_id}"), self.scenario.faults

        def leave(left: int) -> None:
            if not self._is_troubled or not left:
                return
            seconds = rng.expovariate(1 / faults.absence)
            self.remark(agent.client_id, f"is away for {seconds / 3600:.1f} h")
            self.history.faults["absence_gap"] += 1
            agent.offline_until = max(agent.offline_until, self.now + seconds)
            if agent.connection is not None:
                agent.connection.cut(half_open=False)
            self.after(seconds + rng.expovariate(1 / faults.absence_gap), partial(leave, left - 1))

        if faults.absence_gap:
            self.after(rng.expovariate(1 / faults.absence_gap), partial(leave, ABSENCES_MAX))

    def _plan_wrong_clocks(self, who: str, clock: WallClock) -> None:
        """Let a machine's clock go wrong, and right after a while, by chances of its own: those of the world stay."""
        rng, faults = random.Random(f"wrong clocks {self.seed} {who}"), self.scenario.faults

        def go_wrong(left: int) -> None:
            if not self._is_troubled or not left:
                return
            self.remark(who, clock.go_wrong())
            self.history.faults["clock_gap"] += 1
            seconds = rng.expovariate(1 / faults.clock_wrong)
            self.after(seconds, partial(self._set_right, who, clock))
            self.after(seconds + rng.expovariate(1 / faults.clock_gap), partial(go_wrong, left - 1))

        if faults.clock_gap:
            self.after(rng.expovariate(1 / faults.clock_gap), partial(go_wrong, WRONG_CLOCKS_MAX))

    def _set_right(self, who: str, clock: WallClock) -> None:
        self.remark(who, "its clock is set right")
        clock.set()

    def run_ended(self) -> None:
        """Take note of the end of the run, which the operator may reopen."""
        state = self.coordinator.running.ledger.state
        if self._is_resume_planned:
            return
        if state in RESUMABLE and self._resumes_left > 0:
            self._resumes_left -= 1
            self.history.faults["resumes"] += 1
            self._is_resume_planned = True
            self.after(self.rng.expovariate(1 / self.scenario.faults.operator_gap), self._resume)
        elif state in TERMINAL:
            self._ended_at = self.now
            for agent in self.agents.values():  # the faults end with the run, so that the world can end
                agent.offline_until = min(agent.offline_until, self.now + self.scenario.faults.partition)
                agent.wall.set()
            self.coordinator.wall.set()

    def _resume(self) -> None:
        if not self.coordinator.is_up:
            self.after(1.0, self._resume)
            return
        self._is_resume_planned = False
        if self.coordinator.running.ledger.state in RESUMABLE:
            self.coordinator.resume_run()

    def _stranger(self) -> bool:
        """Send an unsolicited message to the coordinator."""
        if not self.coordinator.is_up:
            return False
        self._send_unsolicited()
        return True

    def _send_unsolicited(self) -> None:
        coordinator, rng = self.coordinator, self.rng
        newest = coordinator.running.ledger.next_round - 1
        client_id = rng.choice([*self.agents, ClientId("stranger")])
        round_id = RoundId(newest + rng.choice([-3, -2, -1, -1, 0, 0, 0, 0, 1]))
        version = Version(coordinator.running.ledger.version - rng.choice([0, 0, 0, 1]))
        kind = rng.randrange(8)
        if kind == 0:
            coordinator.post(UploadBegun(client_id, round_id))
        elif kind == 1:
            coordinator.post(ClientEvaluated(client_id, version, None, "not requested"))
        elif kind == 2 and client_id == "stranger":
            coordinator.post(ClientFailed(client_id, round_id, FailureReason.TASK_BROKEN))
        elif kind in (3, 4) and (earlier := self._earlier_updates()):
            coordinator.update_arrived(rng.choice(earlier), None)
        else:
            self._send_unsolicited_update(client_id, round_id, version)

    def _send_unsolicited_update(self, client_id: ClientId, round_id: RoundId, version: Version) -> None:
        rng = self.rng
        digest = Digest(f"strange{rng.randrange(10**6)}")
        update = Update(client_id, round_id, version, digest, rng.choice([1, 7, 7, 0, -5, 10**15]), 1.0)
        work = rng.choice([1.0, 1.0, 1.0, 0.5, 0.0, -1.0, 1.5, float("nan")])
        self.coordinator.update_arrived(replace(update, work=work), None)

    def _earlier_updates(self) -> list[Update]:
        return [step.event.update for step in self.history.steps if isinstance(step.event, UpdateReceived)]
