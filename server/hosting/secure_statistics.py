"""The secure sums of the statistics of one request: the shell around its sessions, and its result.

Sums over several sessions are added: each has other sites, and a site stays in its session in all requests for a task.

It is not journaled, as plain statistics are not: an operator repeats a request after a crash. What a repetition must
keep is durable before its effects (`sum_sites`): the number of the request, and the sites of a sum that may be open.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.ground.printable import count_of, printable
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import MemberKeys, Survivors
from atoll.protocol.secure.session_size import MEMBERS_MIN
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, RoundId, RunId, Version
from atoll.server.clock import MonotoneClock
from atoll.server.config.run import RunConfig
from atoll.server.errors import OperatorError
from atoll.server.hosting.control_streams import Connection, Hub
from atoll.server.hosting.secure_sums import check_keys, member_event, opening_of_numbers
from atoll.server.hosting.secure_terms import options_text, requests_of, terms_of_statistics
from atoll.server.rounds.client_evaluation import ClientEvaluation
from atoll.server.rounds.events import AskEvaluation, Effect
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.secure_evaluation import SecureEvaluation, divided
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import KeysCame, OpeningFailed, OpenSum, SumPlace, TellMember
from atoll.server.statistics.merging import Shown, document
from atoll.server.statistics.sum_sites import Sessions, SumSites
from atoll.task.task import task_name
from atoll.tensors.masked.whole_numbers import num_bytes_of
from atoll.training.statistics.question import Question, summed_parts

logger = logging.getLogger(__name__)

CANNOT_JOIN = "its agent joins no secure sums: update it"
NOT_IN_SUM = "it answered outside of the secure sum"
NOT_ASKED = (
    "not asked: the newest sums of this task's statistics are without it, and their sites sign no others, unless their "
    "policies allow another set (secure.statistics_sets_max): name all sites with secure.statistics.sites"
)

Step = Callable[[float], Effects]


@dataclass(frozen=True, slots=True)
class Asked:
    """The sites of a request."""

    sessions: tuple[tuple[ClientId, ...], ...]
    """The sites of each session, sorted."""
    is_whole: bool
    """Whether all sites of a session are in its sum, or it has none."""
    left_out: tuple[ClientId, ...] = ()
    """Connected sites that are not asked, as they are in none of the newest sums."""

    @property
    def sites(self) -> tuple[ClientId, ...]:
        """All sites, sorted."""
        return tuple(sorted(name for names in self.sessions for name in names))

    def limits(self) -> list[tuple[tuple[ClientId, ...], int]]:
        """Return the sites of each session, and the fewest of them that make a sum."""
        return [(names, len(names) if self.is_whole else MEMBERS_MIN) for names in self.sessions]


def sites_to_ask(config: RunConfig, task: str, connections: list[Connection], known: Sessions) -> Asked:
    """Return the sites that a request asks.

    Args:
        config: the settings of the planned run, with `[secure.statistics]`.
        task: its name.
        connections: of the task's agents.
        known: the sites of each session of the newest sums of the task's statistics; empty: there was none.

    Raises:
        OperatorError: too few, or not those of the newest sums are connected, or a session of theirs is too large.
    """
    secure = config.secure
    assert secure is not None
    assert secure.statistics is not None
    joining = {connection.client_id for connection in connections if connection.joins_sessions}
    of_known = [name for names in known for name in names]
    wanted = tuple(sorted({*map(ClientId, secure.statistics.sites or of_known)}))
    if missing := [name for name in wanted if name not in joining]:
        of = (
            "secure.statistics.sites are"
            if secure.statistics.sites
            else "the newest sums of this task's statistics are of"
        )
        raise OperatorError(
            f"{of} {', '.join(wanted)}, and sites sign no sum over others, unless their policies allow another set "
            f"(secure.statistics_sets_max): {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not connected "
            "or too old: wait for them, or name other sites with secure.statistics.sites"
        )
    found = wanted or tuple(sorted(joining))
    if len(found) < MEMBERS_MIN:
        raise OperatorError(
            f"{count_of(len(found), 'agent')} of {task!r} can join a secure sum, which has at least {MEMBERS_MIN} "
            "members: start or update agents"
        )
    sessions = _divided(found, known, replace(secure.rules(), sessions=1), f"statistics {config.seed} {task}")
    if (largest := max(map(len, sessions))) > secure.session_max:
        raise OperatorError(
            f"the newest sum of this task's statistics is of {count_of(largest, 'site')} in one session, and "
            f"secure.session_max is {secure.session_max}; allowed is at least {largest}: sites sign no sum over others"
        )
    left_out = () if secure.statistics.sites else tuple(sorted(joining.difference(found)))
    return Asked(tuple(sorted(tuple(sorted(names)) for names in sessions)), bool(wanted), left_out)


def _divided(sites: Sequence[ClientId], known: Sessions, rules: SecureRules, name: str) -> list[list[ClientId]]:
    """Divide sites into sessions: those of known sums stay together, as they sign no other one."""
    kept = [[*map(ClientId, names)] for names in known if {*names} <= {*sites}]
    rest = [site for site in sites if not any(site in names for names in kept)]
    if rest and kept and len(rest) < MEMBERS_MIN:  # no session by themselves: another set, which policies may allow
        rest += kept.pop(kept.index(min(kept, key=len)))
    return kept + (divided(rest, rules, name) if rest else [])


@dataclass(frozen=True, slots=True)
class Host:
    """Parts of the coordinator that its secure sums of statistics use."""

    hub: Hub
    clock: MonotoneClock
    authorities: Callable[[], bytes]
    """Returns the certificates of the trusted authorities, PEM."""
    sum_sites: SumSites


class SecureStatistics:
    """One request for statistics in a secure sum. All of it runs on one event loop, its steps one after the other.

    Args:
        config: the settings of the planned run.
        number: of the request.
        asked: the sites.
        deadline: instant by which the sites' keys must come [s since the epoch].
        host: the coordinator.
    """

    def __init__(self, config: RunConfig, number: int, asked: Asked, deadline: float, host: Host) -> None:
        secure = config.secure
        assert secure is not None
        assert secure.statistics is not None
        self._config, self.number = config, number
        self._run_id, self._task = RunId(requests_of(config)), task_name(config.task)
        self._question: Question = secure.statistics.question(config.seed)
        self._asked, self._left_out, self._hub, self._clock = asked.sites, asked.left_out, host.hub, host.clock
        self._authorities, self._sum_sites = host.authorities, host.sum_sites
        evaluation = ClientEvaluation(Version(number), deadline, [*asked.sites], asked_at=host.clock.now())
        self.sums = SecureEvaluation(
            evaluation,
            replace(secure.rules(), sessions=1),
            config.seed,
            lambda client_id: evaluation.ask(client_id, RoundId(0)),
            "statistics",
            asked.limits(),
        )
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._sessions = asked.sessions
        self._signed: Sessions = ()  # the sites of each session of earlier requests
        self._told: dict[int, tuple[ClientId, ...]] = {}  # the sites of each sum that a member may have signed
        self._numbers: dict[int, list[int]] = {}  # of each opened sum

    # ------------------------------------------------------------ in

    def joined(self, client_id: ClientId) -> None:
        """Repeat what a site that has connected again was asked."""
        self._steps.put_nowait(lambda _: self.sums.joined(client_id))

    def gave_up(self, client_id: ClientId, why: str) -> None:
        """Continue without a site: it is lost, declines, or answers plainly."""
        self._steps.put_nowait(lambda now: self.sums.gave_up(client_id, why, now))

    def answered(self, client_id: ClientId, message: pb.ClientMessage) -> None:
        """Take a member's message; one that fails a check is its sender's end in this session alone."""

        def check(event: KeysCame, keys: MemberKeys) -> None:
            if self.sums.is_news_of(event):
                terms = self._terms(self.sums.place_of(client_id))
                check_keys(keys, client_id, terms, self._authorities())

        def step(now: float) -> Effects:
            event = member_event(client_id, message, "statistics", check, num_bytes_of(self._question.num_numbers))
            return () if event is None else self.sums.came(event, now)

        self._steps.put_nowait(step)

    # ------------------------------------------------------------ the sum

    async def run(self) -> dict[str, Any]:
        """Carry out the request to its end, and return its result without what the caller knows.

        Raises:
            OperatorError, OSError: the record of sums cannot be used.
        """
        self._signed = await on_thread(None, self._sum_sites.sessions_of, self._task)
        for client_id in self._asked:
            await self._carry_out(self.sums.asked(client_id))
        while not self.sums.is_complete:
            wait = self.sums.deadline - self._clock.now()
            try:
                async with asyncio.timeout(None if wait == float("inf") else max(0.0, wait)):
                    step = await self._steps.get()
            except TimeoutError:
                step = self.sums.time_passed
            for effect in step(self._clock.now()):
                await self._carry_out(effect)
        if self._told:
            await self._keep()
        return self._result()

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case AskEvaluation(client_id):
                self._hub.send(client_id, self._request(effect))
            case TellMember(client_id):
                if isinstance(effect.question, Survivors):
                    await self._keep_sites(effect.session, effect.question)
                of = SessionName(self._run_id, effect.round_id, effect.attempt, effect.session, effect.purpose)
                self._hub.send(client_id, wire.question_message(of, effect.question, effect.members))
            case OpenSum():
                await self._open(effect)

    async def _keep_sites(self, session: int, survivors: Survivors) -> None:
        """Make the sites of a sum durable before the first of them is told."""
        names = self.sums.members(session)
        self._told[session] = tuple(names[position] for position in sorted(survivors.positions))
        await self._keep()
        crash_points.reached("statistics.sites_kept")

    async def _keep(self) -> None:
        """Make the sites of all sessions durable, without those that were lost before any of their sites had signed."""
        lost = self.sums.lost()
        sessions = [
            self._told.get(n, names)
            for n, names in enumerate(self._sessions)
            if n in self._told or n not in lost or names in self._signed
        ]
        await on_thread(None, self._sum_sites.keep, self._task, sessions)

    async def _open(self, effect: OpenSum) -> None:
        event, numbers = await on_thread(None, opening_of_numbers, effect, self._question.num_numbers)
        crash_points.reached("statistics.opened")
        if isinstance(event, OpeningFailed):
            failed = event
            self._steps.put_nowait(lambda now: self.sums.opening_failed(failed, now))
            return
        if not event.fault:
            try:
                summed_parts(numbers, self._question, len(effect.sum.survivors))
                self._numbers[effect.sum.session] = numbers
            except ValueError as fault:
                event = replace(event, fault=str(fault))
        self.sums.sum_opened(event)

    def _request(self, effect: AskEvaluation) -> pb.ServerMessage:
        assert effect.sum is not None
        return pb.ServerMessage(
            ask_statistics=pb.AskStatistics(
                run_id=self._run_id,
                number=self.number,
                task=self._task,
                time_left_s=max(0.0, effect.deadline - self._clock.now()),
                local=options_text(self._config),
                model_seed=self._config.seed,
                secure=pb.SecureTerms(terms=self._terms(effect.sum).canonical()),
                question=self._question.text,
            )
        )

    def _terms(self, place: SumPlace) -> Terms:
        return terms_of_statistics(
            self._config,
            run_id=self._run_id,
            task=self._task,
            number=self.number,
            question=self._question,
            place=place,
        )

    def _result(self) -> dict[str, Any]:
        summed, failures = self.sums.outcome()
        failures = failures | dict.fromkeys(self._left_out, NOT_ASKED)
        total = [sum(column) for column in zip(*self._numbers.values(), strict=True)]
        parts = summed_parts(total, self._question, len(summed)) if total else {}
        return {
            "answered": [*summed],
            "refused": {client_id: printable(why) for client_id, why in sorted(failures.items())},
            "secure": {"sites": len(summed)} | self._of_sessions(),
            **_of_ranges(document(Shown(sums=parts))),
        }

    def _of_sessions(self) -> dict[str, Any]:
        """Return how many sums a request of several sessions has added, and which it has lost."""
        if len(self._sessions) == 1:
            return {}
        lost = [{"sites": [*self._sessions[n]], "why": printable(why)} for n, why in sorted(self.sums.lost().items())]
        return {"sessions": len(self._numbers), "lost": lost}


def _of_ranges(found: dict[str, Any]) -> dict[str, Any]:
    """Return a document whose columns have the number of values outside of their range, infinite ones included.

    A sum is a whole number of steps: a variance of 0 may come out as less than 0 by a step.
    """
    for parts in found["merged"].values():
        for group in ("targets", "features"):
            for column in parts.get(group, {}).values():
                column["outside"] = column.pop("infinite")
                if column["variance"] is not None:
                    column["variance"] = max(0.0, column["variance"])
    return found
