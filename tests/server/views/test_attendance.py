"""The clients as rows: the coordinator says who is connected, a run says whom it can invite."""

from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.register import Member, Standing
from atoll.server.names.presence import FILE, Arriving, Presence, Present, presence_shown
from atoll.server.names.shown_file import ShownFile
from atoll.server.views.attendance import UNKNOWN, attended

HERE = Present("north", 1000.0, "10.0.0.7:4711", "atoll 0.2.0", -1.5, 5000.0)


def member(name, standing=Standing.MEMBER, until=4000.0):
    return Member(Identity(Role.CLIENT, name), standing, 1.0, until)


def row(name, **fields):
    return UNKNOWN | {"client": name, "connected": False, "why_not": "not connected"} | fields


def of(rows, client):
    return next(row for row in rows if row["client"] == client)


def test_a_connected_client_is_connected_whatever_the_run_says():
    presence = Presence((HERE,))
    for rows, over, why in [
        ([row("north", software="atoll 0.1.0")], "the run is finished", "the run is finished"),
        ([row("north")], "", "has not joined"),
        ([], "there is no run yet", "there is no run yet"),
        ([row("north", connected=True, available=True, why_not="")], "", ""),
    ]:
        [found] = attended(rows, presence, [member("north")], over)
        assert (found["connected"], found["connected_since"], found["why_not"]) == (True, 1000.0, why)
        assert (found["software"], found["clock_offset"], found["certificate_until"]) == ("atoll 0.2.0", -1.5, 5000.0)


def test_a_client_that_the_run_still_holds_for_connected_is_not_when_the_coordinator_says_so():
    [found] = attended([row("north", connected=True, available=True, why_not="")], Presence(), [])
    assert (found["connected"], found["available"], found["why_not"]) == (False, False, "not connected")


def test_what_the_run_says_stands_where_the_coordinator_cannot_be_asked():
    [found] = attended([row("north", connected=True, available=True, why_not="")], None, [])
    assert (found["connected"], found["available"]) == (True, True)


def test_members_that_never_joined_are_listed_and_those_that_are_revoked_are_not():
    members = [member("east"), member("new", Standing.INVITED), member("gone", Standing.REVOKED)]
    rows = attended([row("old"), row("gone")], Presence(), members)
    assert [found["client"] for found in rows] == ["east", "gone", "new", "old"], "a run keeps its clients"
    assert (of(rows, "east")["certificate_until"], of(rows, "east")["why_not"]) == (4000.0, "has not joined")
    assert (of(rows, "new")["certificate_until"], of(rows, "new")["standing"]) == (None, "invited")


def test_a_renewed_certificate_counts_although_the_connection_has_the_older_one():
    [found] = attended([], Presence((HERE,)), [member("north", until=9000.0)])
    assert found["certificate_until"] == 9000.0


def test_the_file_shows_what_was_written_and_none_of_an_earlier_process(tmp_path):
    shown, arriving = ShownFile(tmp_path / FILE, "it"), Arriving("run-1", 2, "north", 10, 20)
    assert presence_shown(tmp_path) is None
    shown.show(Presence((HERE,), (arriving,)))
    assert presence_shown(tmp_path) == Presence((HERE,), (arriving,))
    shown.show(Presence())
    assert presence_shown(tmp_path) == Presence()
    (tmp_path / "presence.json").write_text('{"clients": [{"x": 1}]}')
    assert presence_shown(tmp_path) is None
    ShownFile(tmp_path / FILE, "it")
    assert not (tmp_path / "presence.json").exists()
