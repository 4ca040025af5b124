"""The secure sum of a request for statistics, between the coordinator's shell and those of agents, in memory."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.client.wire.messages import event_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import to_pem
from atoll.protocol.vocabulary import ClientId
from atoll.server.config.run import RunConfig
from atoll.server.errors import OperatorError
from atoll.server.hosting import secure_sums
from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.secure_statistics import Asked, Host, SecureStatistics, sites_to_ask
from atoll.server.members.member import Profile
from atoll.server.statistics.sum_sites import SumSites
from tests.client.site.sites import CA, NOW, sites_of
from tests.client.work.test_sums_of_metrics import Shells
from tests.client.work.test_sums_of_statistics import ALLOWS, statistics_of

TASK = "digits:task"


@pytest.fixture(autouse=True)
def _at_the_time_of_the_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_sums, "time", SimpleNamespace(time=lambda: NOW))


def config_of(*, session_max: int = 64, **statistics: Any) -> RunConfig:
    asked = {"labels": {"target": 2}, "features": {"age": [0, 100]}, **statistics}
    secure = {
        "clip_norm": 1.0,
        "examples_max": 10,
        "stage_timeout": 5.0,
        "statistics": asked,
        "session_max": session_max,
    }
    return RunConfig.model_validate({"task": TASK, "name": "digits", "round": {"cohort_size": 3}, "secure": secure})


class Clock:
    """The clock of a coordinator: wall time."""

    def now(self) -> float:
        return NOW + asyncio.get_running_loop().time()


class Federation(Shells):
    """Sites, and what a coordinator sends them and they answer; it is the coordinator's hub, too."""

    def __init__(self, root: Path, number: int = 4, policy: str = ALLOWS) -> None:
        self.request: SecureStatistics | None = None
        self.silent: set[str] = set()
        self.faults, self.draw = 0.0, random.Random(0)
        self.told: list[tuple[str, str]] = []
        self.sets: list[tuple[tuple[str, ...], ...]] = []
        (root / "state").mkdir(parents=True, exist_ok=True)
        self.sum_sites = SumSites(root / "state")
        super().__init__(root, sites_of(root, number, policy))

    def shell(self, site: Any) -> Any:
        shell = super().shell(site)
        shell._send = lambda message: self.said(site.name, message)
        return shell

    def said(self, name: str, message: pb.ClientMessage) -> None:
        if self.request is not None and name not in self.silent:
            self.request.answered(ClientId(name), message)

    def send(self, name: str, message: pb.ServerMessage) -> None:
        """Deliver a message soon: the hub's method."""
        kind = message.WhichOneof("message")
        self.told.append((name, kind))
        if kind == "secure_survivors":
            self.sets.append(self.sum_sites.sessions_of(TASK))
        asyncio.get_running_loop().call_soon(self.deliver, name, message)

    def deliver(self, name: str, message: pb.ServerMessage) -> None:
        if self.draw.random() < self.faults:
            self.restart(name)
            return
        if message.HasField("ask_statistics"):
            asked = event_of(message)
            place = [*self.sites].index(name)
            self.shells[name].join(asked.request, statistics_of(place))
        else:
            self.shells[name].asked(message)

    def restart(self, name: str) -> None:
        self.sites[name].start()
        self.shells[name] = self.shell(self.sites[name])
        if self.request is not None:
            self.request.joined(ClientId(name))

    def begin(
        self, number: int = 1, config: RunConfig | None = None, sessions: Any = None, is_whole: bool = False
    ) -> Any:
        config = config or config_of()
        asked = Asked(tuple(tuple(map(ClientId, names)) for names in sessions or [self.sites]), is_whole)
        self.request = SecureStatistics(
            config,
            number,
            asked,
            Clock().now() + 5.0,
            Host(self, Clock(), lambda: to_pem(CA.certificate), self.sum_sites),  # type: ignore[arg-type]
        )
        return self.request.run()


def run(root: Path, scenario: Any, **given: Any) -> Any:
    async def whole() -> Any:
        return await asyncio.wait_for(scenario(Federation(root, **given)), 60)

    return asyncio.run(whole())


def check(found: dict[str, Any]) -> None:
    """Check that a result is the sum of its sites."""
    places = [int(name.removeprefix("site-")) for name in found["answered"]]
    assert found["secure"]["sites"] == len(places)
    assert not found["sites"]
    if not places:
        assert not found["merged"]
        return
    train = found["merged"]["train"]
    assert (train["examples"], train["sites"]) == (2 * len(places), len(places))
    assert train["features"]["age"]["sum"] == sum(10 * place + 20 for place in places)
    assert train["features"]["age"]["sum_of_squares"] == sum(100 * place**2 + 400 for place in places)
    assert train["feature_bins"]["age"]["counts"] == {"[0, 100]": 2 * len(places)}


def test_all_sites_are_one_sum_and_its_sites_are_durable_before_they_are_told(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        return await it.begin(), it.sets

    found, sets = run(tmp_path, scenario)
    check(found)
    names = ("site-0", "site-1", "site-2", "site-3")
    assert found["answered"] == [*names]
    assert found["refused"] == {}
    assert found["merged"]["train"]["features"]["age"]["outside"] == 0
    assert sets == [(names,)] * 4
    assert found["secure"] == {"sites": 4}


def test_sites_that_decline_are_lost_or_answer_plainly_are_left_out_with_the_reason(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        it.silent |= {"site-0", "site-1", "site-2"}
        ended = asyncio.ensure_future(it.begin())
        await asyncio.sleep(0)
        assert it.request is not None
        it.request.gave_up(ClientId("site-0"), "policy_refused: statistics: no statistics leave this site")
        it.request.gave_up(ClientId("site-1"), "lost: left")
        it.request.gave_up(ClientId("site-2"), "it answered outside of the secure sum")
        return await ended

    found = run(tmp_path, scenario, number=6)
    check(found)
    assert found["answered"] == ["site-3", "site-4", "site-5"]
    assert found["refused"] == {
        "site-0": "policy_refused: statistics: no statistics leave this site",
        "site-1": "lost: left",
        "site-2": "it answered outside of the secure sum",
    }


def test_too_few_sites_make_no_sum(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        it.silent.add("site-0")
        ended = asyncio.ensure_future(it.begin())
        await asyncio.sleep(0)
        assert it.request is not None
        it.request.gave_up(ClientId("site-0"), "lost: left")
        return await ended

    found = run(tmp_path, scenario, number=3)
    check(found)
    assert found["answered"] == []
    assert found["refused"]["site-1"] == "its secure sum has no result: attempt 1: 2 members; needed: 3"


def test_of_named_sites_all_are_in_the_sum_or_there_is_none(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        it.silent.add("site-0")
        ended = asyncio.ensure_future(it.begin(is_whole=True))
        await asyncio.sleep(0)
        assert it.request is not None
        it.request.gave_up(ClientId("site-0"), "lost: left")
        return await ended

    found = run(tmp_path, scenario, number=5)
    assert found["answered"] == []
    assert "4 members; needed: 5" in found["refused"]["site-1"]


def test_a_repeated_request_gets_the_same_sum_of_the_same_sites(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        first = await it.begin(1)
        again = await it.begin(2)
        fewer = await it.begin(3, sessions=[["site-0", "site-1", "site-2"]])
        return first, again, fewer

    first, again, fewer = run(tmp_path, scenario)
    assert first == again
    assert fewer["answered"] == []
    assert "over 1 set of sites, and this sum would be over another" in fewer["refused"]["site-0"]


def test_messages_of_others_change_nothing(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        said, seen = it.said, []

        def twice(name: str, message: pb.ClientMessage) -> None:
            seen.append(message)
            other = "site-1" if name == "site-0" else "site-0"
            said(other, message)  # under another name: refused, or not awaited
            said("stranger", message)

        honest = [*it.sites][2:]
        it.said = lambda name, message: said(name, message) if name in honest else twice(name, message)  # type: ignore[method-assign]
        return await it.begin()

    found = run(tmp_path, scenario, number=5)
    check(found)
    assert found["answered"] == ["site-2", "site-3", "site-4"]
    assert "its keys are of site-" in found["refused"]["site-0"]


@pytest.mark.parametrize("seed", range(12))
def test_a_schedule_of_restarts_ends_with_the_sum_of_its_sites_or_none(tmp_path: Path, seed: int) -> None:
    async def scenario(it: Federation) -> list[dict[str, Any]]:
        it.draw, it.faults = random.Random(seed), 0.08
        found = [await it.begin(1)]
        it.faults = 0.0
        known = it.sum_sites.sessions_of(TASK)
        found.append(await it.begin(2, sessions=known, is_whole=bool(known)))
        return found

    first, second = run(tmp_path, scenario, number=4 + seed % 3)
    check(first)
    check(second)
    assert second["answered"], "without faults the same sites are added"
    if first["answered"]:
        assert second["answered"] == first["answered"]


def connection(name: str, *, joins: bool = True) -> Connection:
    return Connection(ClientId(name), "s", frozenset({TASK}), Profile(), joins_sessions=joins)


def test_the_sites_of_the_newest_sum_are_asked_again_or_the_operator_names_others() -> None:
    four = [connection(name) for name in "abcd"]
    abc = (("a", "b", "c"),)
    assert sites_to_ask(config_of(), TASK, four, ()) == Asked((tuple("abcd"),), False)  # type: ignore[arg-type]
    assert sites_to_ask(config_of(), TASK, four, abc) == Asked((tuple("abc"),), True, tuple("d"))  # type: ignore[arg-type]
    named = config_of(sites=["d", "b", "a", "c"])
    assert sites_to_ask(named, TASK, four, abc) == Asked((tuple("abcd"),), True)  # type: ignore[arg-type]
    for config, connections, known, said in (
        (
            config_of(),
            four,
            (("a", "b", "e"),),
            "the newest sums of this task's statistics are of a, b, e, and sites sign no",
        ),
        (named, four[:2], (), "secure.statistics.sites are a, b, c, d, and sites sign no sum over others"),
        (config_of(), four[:2], (), "2 agents of 'digits:task' can join a secure sum, which has at least 3 members"),
        (config_of(), [*four[:2], connection("old", joins=False)], (), "2 agents of"),
    ):
        with pytest.raises(OperatorError, match=said):
            sites_to_ask(config, TASK, connections, known)


def test_the_record_of_sums_survives_a_restart_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    first = SumSites(tmp_path)
    assert (first.newest(), first.sessions_of(TASK)) == (0, ())
    first.begin(4)
    first.keep(TASK, [("b", "a"), ("d", "e")])
    first.keep("other", [("c",)])
    first.begin(5)
    again = SumSites(tmp_path)
    both = (("a", "b"), ("d", "e"))
    assert (again.newest(), again.sessions_of(TASK), again.sessions_of("other")) == (5, both, (("c",),))
    (tmp_path / "statistics" / "secure.json").write_text('{"newest": 3, "sites": {"digits:task": ["a", "b"]}}')
    assert again.sessions_of(TASK) == (("a", "b"),), "as a version for sums of one session has kept them"
    for damaged in (b"{", b"[]", b'{"newest": 1}', b'{"newest": 1, "sites": []}'):
        (tmp_path / "statistics" / "secure.json").write_bytes(damaged)
        with pytest.raises(OperatorError, match=r"secure\.json is damaged: put it back from a backup"):
            again.newest()


TWO = [["site-0", "site-1", "site-2"], ["site-3", "site-4", "site-5", "site-6"]]


def test_sums_over_two_sessions_are_added_and_each_site_stays_in_its_session(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        first = await it.begin(1, sessions=TWO)
        known = it.sum_sites.sessions_of(TASK)
        again = await it.begin(2, sessions=known, is_whole=True)
        mixed = await it.begin(3, sessions=[TWO[0][:2] + TWO[1][:2], TWO[0][2:] + TWO[1][2:]])
        return first, known, again, mixed, it.sets

    first, known, again, mixed, sets = run(tmp_path, scenario, number=7)
    check(first)
    assert first["answered"] == [f"site-{number}" for number in range(7)]
    assert first["secure"] == {"sites": 7, "sessions": 2, "lost": []}
    assert known == tuple(map(tuple, TWO))
    assert {*sets} == {known}, "also the session whose survivors are not told yet"
    assert again == first
    assert mixed["answered"] == []
    assert [each["sites"] for each in mixed["secure"]["lost"]] == [TWO[0][:2] + TWO[1][:2], TWO[0][2:] + TWO[1][2:]]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_session_that_is_lost_is_named_and_the_other_counts(tmp_path: Path, lost: int) -> None:
    async def scenario(it: Federation) -> Any:
        gone = TWO[lost][:2]
        it.silent |= {*gone}
        ended = asyncio.ensure_future(it.begin(1, sessions=TWO))
        await asyncio.sleep(0)
        assert it.request is not None
        for name in gone:
            it.request.gave_up(ClientId(name), "lost: left")
        return await ended, it.sum_sites.sessions_of(TASK)

    found, known = run(tmp_path, scenario, number=7)
    check(found)
    assert found["answered"] == TWO[1 - lost]
    [named] = found["secure"]["lost"]
    assert found["secure"]["sessions"] == 1
    assert named["sites"] == TWO[lost]
    assert "needed: 3" in named["why"]
    assert {*found["refused"]} == {*TWO[lost]}
    assert known == (tuple(TWO[1 - lost]),), "its sites have signed nothing: they may be in another session"


def test_a_session_that_has_signed_before_is_remembered_also_if_a_later_request_loses_it(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        await it.begin(1, sessions=TWO)
        it.silent.add("site-0")
        ended = asyncio.ensure_future(it.begin(2, sessions=it.sum_sites.sessions_of(TASK), is_whole=True))
        await asyncio.sleep(0)
        assert it.request is not None
        it.request.gave_up(ClientId("site-0"), "lost: left")
        second = await ended
        it.silent.clear()
        known = it.sum_sites.sessions_of(TASK)
        return second, known, await it.begin(3, sessions=known, is_whole=True)

    second, known, third = run(tmp_path, scenario, number=7)
    assert [each["sites"] for each in second["secure"]["lost"]] == [TWO[0]]
    assert known == tuple(map(tuple, TWO)), "its sites sign no other sum"
    check(third)
    assert third["answered"] == TWO[0] + TWO[1]


def test_a_sum_that_fails_its_canaries_is_lost_alone(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        said = it.said

        def spoiled(name: str, message: pb.ClientMessage) -> None:
            if name == "site-1" and message.HasField("secure_masked"):
                message.secure_masked.words = bytes(len(message.secure_masked.words))
            said(name, message)

        it.said = spoiled  # type: ignore[method-assign]
        return await it.begin(1, sessions=TWO), it.sum_sites.sessions_of(TASK)

    found, known = run(tmp_path, scenario, number=7)
    check(found)
    assert found["answered"] == TWO[1]
    assert [each["sites"] for each in found["secure"]["lost"]] == [TWO[0]]
    assert known == tuple(map(tuple, TWO)), "its sites have signed this sum, and sign no other one"


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_of_restarts_ends_with_the_sums_of_some_sessions(tmp_path: Path, seed: int) -> None:
    async def scenario(it: Federation) -> list[dict[str, Any]]:
        it.draw, it.faults = random.Random(seed), 0.06
        found = [await it.begin(1, sessions=TWO)]
        it.faults = 0.0
        known = it.sum_sites.sessions_of(TASK)
        return [*found, await it.begin(2, sessions=known or TWO, is_whole=bool(known))]

    first, second = run(tmp_path, scenario, number=7)
    check(first)
    check(second)
    assert {*second["answered"]} >= {*first["answered"]}
    assert second["answered"]


def test_more_sites_than_a_session_has_are_divided_and_known_sessions_stay_together() -> None:
    many = [connection(f"s{n:02d}") for n in range(70)]
    first = sites_to_ask(config_of(), TASK, many, ())  # type: ignore[arg-type]
    assert (first.is_whole, [len(names) for names in first.sessions]) == (False, [35, 35])
    assert first.sites == tuple(f"s{n:02d}" for n in range(70))
    assert sites_to_ask(config_of(), TASK, many, ()) == first  # type: ignore[arg-type]
    assert sites_to_ask(config_of(), TASK, many, first.sessions) == Asked(first.sessions, True)  # type: ignore[arg-type]
    named = config_of(sites=list(first.sites))
    known = first.sessions[:1]  # the other one was lost
    assert sites_to_ask(named, TASK, many, known) == Asked(first.sessions, True)  # type: ignore[arg-type]
    other = (first.sites[:5],)
    more = sites_to_ask(named, TASK, many, other)  # type: ignore[arg-type]
    assert other[0] in more.sessions
    assert sorted(len(names) for names in more.sessions if names != other[0]) == [32, 33]
    assert more.sites == first.sites
    small = config_of(session_max=20)
    with pytest.raises(
        OperatorError, match=r"is of 35 sites in one session, and secure\.session_max is 20; allowed is at"
    ):
        sites_to_ask(small, TASK, many, first.sessions)  # type: ignore[arg-type]


def test_a_request_says_how_its_numbers_are_laid_out(tmp_path: Path) -> None:
    async def scenario(it: Federation) -> Any:
        sent: asyncio.Queue[Any] = asyncio.Queue()
        it.send = lambda name, message: sent.put_nowait(message)  # type: ignore[method-assign]
        ended = asyncio.ensure_future(it.begin(7))
        asked = [event_of(await sent.get()).request for _ in range(3)]
        ended.cancel()
        return asked

    asked = run(tmp_path, scenario, number=3)
    assert {(each.number, each.question.in_words()) for each in asked} == {
        (7, "train: examples, labels of target (2), age within 0 to 100 (1 bin)")
    }
