"""The ranks as the coordinator sees them: connections, the assignment of clients, folds and their repetition."""

import asyncio
import functools
import time

import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.wire.channel import CHUNK_BYTES, MESSAGE_BYTES_MAX
from atoll.server.errors import UpdateDamaged
from atoll.server.names.places import Places
from atoll.server.ranks import registry as ranks_module
from atoll.server.ranks.registry import FoldRefused, RankConnection, Ranks, RanksAway
from tests.waiting import BOUND_S


def on_loop(test):
    """Run an async test on a loop of its own, within ten seconds."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def bounded():
            async with asyncio.timeout(BOUND_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(ranks_module, "AGAIN_S", 0.01)


class Fold:
    """A fold of some ranks that a test answers for."""

    def __init__(self, num_ranks=2, plan=b"plan", patience=5.0):
        self.changes = 0
        self.ranks = Ranks(num_ranks, self.changed, Places(None, time.time))
        self.plan, self.patience = plan, patience
        self.here = [self.join(rank) for rank in range(num_ranks)]

    def changed(self):
        self.changes += 1

    def join(self, rank):
        connection = RankConnection(rank, f"127.0.0.1:{7000 + rank}", f"127.0.0.1:{8000 + rank}")
        self.ranks.join(connection)
        assert connection.outbox.get_nowait().WhichOneof("order") == "welcome"
        return connection

    def begin(self):
        return asyncio.ensure_future(self.ranks.fold("r-1", 3, self.plan, patience=self.patience))

    async def order(self, rank):
        """The next order to fold that a rank gets, with the whole plan."""
        plan = b""
        while (order := await self.here[rank].outbox.get()) is not None:
            match order.WhichOneof("order"):
                case "plan_part":
                    assert order.ByteSize() < MESSAGE_BYTES_MAX
                    plan += order.plan_part
                case "fold":
                    return order.fold, plan + order.fold.plan
        raise AssertionError("the stream was ended")

    def says(self, rank, **message):
        self.ranks.heard(self.here[rank], pb.RankMessage(**message))

    def folded(self, rank, attempt, digest=b"d"):
        self.says(rank, folded=pb.Folded(attempt=attempt, sha256=[digest]))

    def failed(self, rank, attempt, *, again, detail="why", damaged=b""):
        self.says(rank, fold_failed=pb.FoldFailed(attempt=attempt, again=again, detail=detail, damaged=damaged))

    def broken_off(self, rank):
        """The attempts that a rank is told to give up."""
        outbox, found = self.here[rank].outbox, []
        while not outbox.empty():
            order = outbox.get_nowait()
            if order is not None and order.WhichOneof("order") == "break_off":
                found.append(order.break_off)
        return found


@on_loop
async def test_clients_are_spread_over_the_ranks_that_are_here_and_over_all_when_none_is():
    fold = Fold(3)
    assert [fold.ranks.assign() for _ in range(4)] == [0, 1, 2, 0]
    fold.ranks.leave(fold.here[1])
    assert [fold.ranks.assign() for _ in range(4)] == [2, 0, 2, 0]
    assert list(fold.ranks.addresses().addresses) == ["127.0.0.1:7000", "", "127.0.0.1:7002"]
    assert [row.address for row in fold.ranks.rows()] == ["127.0.0.1:7000", "", "127.0.0.1:7002"]
    nobody = Ranks(3, lambda: None, Places(None, time.time))
    assert [nobody.assign() for _ in range(4)] == [0, 1, 2, 0]


@on_loop
async def test_the_plan_travels_in_parts_and_results_return_in_order():
    plan = bytes(range(256)) * (5 * CHUNK_BYTES // 512) + b"end"
    fold = Fold(2, plan)
    waiting = fold.begin()
    orders = [await fold.order(rank) for rank in (0, 1)]
    assert [got for _, got in orders] == [plan, plan]
    (first, _), (second, _) = orders
    assert first == second
    assert (first.run_id, first.round_id, first.store_address) == ("r-1", 3, "127.0.0.1:8000")
    fold.folded(1, first.attempt, b"1")
    fold.folded(0, first.attempt, b"0")
    assert [list(folded.sha256) for folded in await waiting] == [[b"0"], [b"1"]]


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@on_loop
async def test_a_plan_of_any_length_arrives_whole(num_bytes):
    fold = Fold(1, b"x" * num_bytes)
    waiting = fold.begin()
    order, plan = await fold.order(0)
    assert len(plan) == num_bytes
    fold.folded(0, order.attempt)
    await waiting


@pytest.mark.real
@on_loop
async def test_the_death_of_a_rank_ends_the_fold_which_begins_again_when_it_is_back():
    fold = Fold(2)
    waiting = fold.begin()
    (first, _), _ = await fold.order(0), await fold.order(1)
    fold.ranks.leave(fold.here[1])
    assert fold.broken_off(0) == [first.attempt]
    assert not waiting.done()
    fold.failed(0, first.attempt, again=True)
    fold.here[1] = fold.join(1)
    (second, _), _ = await fold.order(0), await fold.order(1)
    assert second.attempt != first.attempt
    fold.folded(0, first.attempt)  # of the attempt that nobody waits for
    fold.folded(0, second.attempt)
    assert not waiting.done()
    fold.folded(1, second.attempt)
    assert len(await waiting) == 2


@on_loop
async def test_a_rank_that_dies_when_it_has_folded_has_folded():
    fold = Fold(2)
    waiting = fold.begin()
    (order, _), _ = await fold.order(0), await fold.order(1)
    fold.folded(0, order.attempt)
    fold.ranks.leave(fold.here[0])
    assert fold.broken_off(1) == []
    fold.folded(1, order.attempt)
    assert len(await waiting) == 2


@pytest.mark.real
@on_loop
async def test_a_ranks_newer_stream_replaces_the_older_and_begins_the_fold_again():
    fold = Fold(2)
    waiting = fold.begin()
    (first, _), _ = await fold.order(0), await fold.order(1)
    older, fold.here[0] = fold.here[0], fold.join(0)
    assert fold.broken_off(1) == [first.attempt]
    fold.ranks.leave(older)  # its handler ends later: that is nobody's departure
    assert fold.ranks.addresses().addresses[0]
    fold.failed(1, first.attempt, again=True)
    (second, _), _ = await fold.order(0), await fold.order(1)
    for rank in (0, 1):
        fold.folded(rank, second.attempt)
    await waiting


@on_loop
async def test_a_fault_of_the_updates_ends_the_fold_whatever_other_ranks_answer():
    fold = Fold(3)
    waiting = fold.begin()
    (order, _), _, _ = await fold.order(0), await fold.order(1), await fold.order(2)
    fold.failed(0, order.attempt, again=True, detail="rank 2 is gone")
    fold.failed(2, order.attempt, again=False, detail="update u7 is damaged")
    with pytest.raises(FoldRefused, match="rank 2: update u7 is damaged"):
        await waiting
    assert fold.broken_off(1) == [order.attempt]


@on_loop
async def test_an_update_that_is_damaged_at_a_rank_is_named_by_its_digest():
    fold = Fold(1)
    waiting = fold.begin()
    order, _ = await fold.order(0)
    fold.failed(0, order.attempt, again=False, detail="u7.bin is gone", damaged=bytes.fromhex("ab" * 32))
    with pytest.raises(UpdateDamaged, match=r"rank 0: u7.bin is gone") as caught:
        await waiting
    assert caught.value.digest == "ab" * 32


@on_loop
async def test_a_rank_that_does_not_come_back_ends_the_wait_with_its_name():
    fold = Fold(2, patience=0.05)
    fold.ranks.leave(fold.here[1])
    with pytest.raises(RanksAway, match=r"aggregation rank 1 of 2 has been away for 0\.05 s"):
        await fold.begin()


@on_loop
async def test_a_rank_that_was_away_hears_what_it_may_delete():
    fold = Fold(2)
    fold.ranks.leave(fold.here[1])
    for current in (3, 4):
        fold.ranks.collect(pb.Collect(run_id="r-1", current=current))
    fold.here[1] = fold.join(1)
    assert [fold.here[0].outbox.get_nowait().collect.current for _ in range(2)] == [3, 4]
    assert fold.here[1].outbox.get_nowait().collect.current == 4
    assert fold.here[1].outbox.empty()


@on_loop
async def test_the_ranks_meet_at_rank_0s_newest_address():
    fold = Fold(2)
    fold.says(0, status=pb.RankStatus(store_address="127.0.0.1:9000"))
    fold.says(0, status=pb.RankStatus())
    waiting = fold.begin()
    assert (await fold.order(1))[0].store_address == "127.0.0.1:9000"
    waiting.cancel()


@pytest.mark.real
@on_loop
async def test_two_folds_are_done_one_after_the_other():
    fold = Fold(1)
    first, second = fold.begin(), fold.begin()
    (one, _) = await fold.order(0)
    await asyncio.sleep(0.02)
    assert fold.here[0].outbox.empty()
    fold.folded(0, one.attempt)
    await first
    (two, _) = await fold.order(0)
    fold.folded(0, two.attempt)
    await second


@on_loop
async def test_a_rank_without_room_is_told_of_as_long_as_it_lasts():
    told = []
    fold = Fold()
    fold.ranks._on_full = lambda run_id, detail: told.append((run_id, detail))
    fold.says(1, status=pb.RankStatus(shortages=[pb.Shortage(run_id="r-1", detail="no room")]))
    assert told == [("r-1", "aggregation rank 1: no room")]
    assert (fold.ranks.are_full("r-1"), fold.ranks.are_full("r-2")) == (True, False)
    fold.says(1, status=pb.RankStatus())
    assert not fold.ranks.are_full("r-1")
    fold.says(0, status=pb.RankStatus(shortages=[pb.Shortage(run_id="r-1", detail="no room")]))
    fold.ranks.leave(fold.here[0])
    assert not fold.ranks.are_full("r-1"), "a rank that is away says nothing"
