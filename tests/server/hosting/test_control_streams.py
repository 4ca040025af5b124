import asyncio

from atoll.protocol import atoll_pb2 as pb
from atoll.server.hosting.control_streams import OUTBOX_MAX, Connection, Hub
from atoll.server.members.member import Profile
from tests.waiting import BOUND_S

MESSAGE = pb.ServerMessage(release=pb.Release(round_id=1))


def connection(name="a", session="s"):
    return Connection(name, session, frozenset({"t"}), Profile())


def test_newest_connection_of_a_client_wins_and_the_older_one_is_told_why():
    hub, older, newer = Hub(), connection(session="1"), connection(session="2")
    hub.add(older)
    hub.add(newer)
    assert older.is_closing
    assert "replaced by a newer connection of a" in older.why
    hub.send("a", MESSAGE)
    assert newer.outbox.get_nowait() == MESSAGE
    assert not hub.remove(older), "the end of the older stream says nothing about the client"
    assert hub.remove(newer)
    assert len(hub) == 0


def test_client_that_does_not_read_loses_its_connection_and_not_the_servers_memory():
    slow = connection()
    for _ in range(10 * OUTBOX_MAX):
        slow.send(MESSAGE)
    assert slow.is_closing
    assert slow.outbox.qsize() <= OUTBOX_MAX + 1


def test_message_to_a_client_that_is_away_is_dropped():
    Hub().send("nobody", MESSAGE)


def test_hub_says_when_the_last_client_has_left():
    async def check():
        hub, only = Hub(), connection()
        hub.add(only)
        waiting = asyncio.ensure_future(hub.empty())
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.remove(only)
        await asyncio.wait_for(waiting, BOUND_S)

    asyncio.run(check())
