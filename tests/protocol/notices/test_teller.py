"""The teller: what it looks at is logged and delivered once, also across restarts; a failure stalls nothing."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from atoll.protocol.notices import teller
from atoll.protocol.notices.book_file import FILE, notices_shown
from atoll.protocol.notices.notice import Condition, Notice
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.notices.teller import Notices, Teller
from tests.protocol.notices.receivers import http_server
from tests.waiting import BOUND_S

DISK = Notice(Condition.DISK, "/state", "the disk has 1 B free: free some")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)


def notices(folder, url="", active=(DISK,)):
    async def look(_book, _now):
        return list(active)

    return Notices(NotifyConfig(url=url), folder, Teller("coordinator"), look)


def test_a_condition_is_delivered_once_also_after_a_restart(tmp_path):
    async def lives():
        with http_server() as server:
            for _ in range(3):  # no life ends in order
                one = notices(tmp_path, server.url)
                await one.look()
                await one.look()
            return server.bodies

    [message] = asyncio.run(lives())
    assert (message["condition"], message["message"]) == ("disk", DISK.sentence)


def test_without_a_way_the_log_has_it_once(tmp_path, caplog):
    async def lives():
        for _ in range(2):
            one = notices(tmp_path)
            await one.look()
            await one.look()

    with caplog.at_level("INFO"):
        asyncio.run(lives())
    assert [record.message for record in caplog.records] == [DISK.sentence]
    assert caplog.records[0].levelname == "WARNING"
    assert notices_shown(tmp_path) == [DISK.sentence]


def test_a_sentence_that_the_log_has_already_is_not_repeated_there(tmp_path, caplog):
    async def life():
        with http_server() as server:
            clock = Notice(Condition.CLOCK, "journal", "the clocks differ", is_logged=True)
            await notices(tmp_path, server.url, [clock]).look()
            return server.bodies

    with caplog.at_level("INFO"):
        assert len(asyncio.run(life())) == 1
    assert caplog.records == []


def test_a_failure_is_logged_once_and_repeated_until_it_is_delivered(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(teller, "RETRY_S", (0.01, 0.02))

    async def life():
        with http_server(status=503) as server:
            one = notices(tmp_path, server.url)
            for _ in range(5):
                await one.look()
                await asyncio.sleep(0.03)
            server.status = 200
            await one.look()
            await one.look()
            return server.bodies

    with caplog.at_level("INFO"):
        assert len(asyncio.run(life())) == 1
    said = [record.message for record in caplog.records]
    assert said[0] == DISK.sentence
    assert said[1].startswith("notify: http://127.0.0.1: it answers 503")
    assert said[2] == "notify: http://127.0.0.1 accepts messages again"
    assert len(said) == 3
    assert "secret" not in " ".join(said)


def test_an_event_that_was_not_delivered_is_after_a_restart(tmp_path):
    event = Notice(Condition.VERSION, "north", "site north runs 2 now")

    async def lives():
        with http_server(status=503) as server:
            one = notices(tmp_path, server.url, ())
            one.post(event)
            await one.look()
            server.status = 200
            await notices(tmp_path, server.url, ()).look()
            return server.bodies

    [message] = asyncio.run(lives())
    assert message["message"] == event.sentence


def test_a_receiver_that_hangs_delays_the_end_by_a_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(teller, "CLOSE_S", 0.3)

    async def life():
        loop = asyncio.get_running_loop()
        hangs, released = asyncio.Event(), threading.Event()
        with http_server(before=lambda: (loop.call_soon_threadsafe(hangs.set), released.wait(BOUND_S))) as server:
            one = notices(tmp_path, server.url)
            running = asyncio.ensure_future(one.run())
            await hangs.wait()
            begun = loop.time()
            await asyncio.sleep(0.01)  # the loop is free
            await one.close()
            took = loop.time() - begun
            running.cancel()
            released.set()
            return took

    assert asyncio.run(life()) < BOUND_S / 2
    assert json.loads((tmp_path / FILE).read_text())["due"]  # its outcome is not known


def test_a_command_that_hangs_does_not_outlive_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(teller, "CLOSE_S", 0.3)
    pids = tmp_path / "pids"

    async def look(_book, _now):
        return [DISK]

    async def life():
        command = f"sh -c 'echo $$ > {pids}; sleep 300 & echo $! >> {pids}; wait'"
        one = Notices(NotifyConfig(command=command), tmp_path, Teller("coordinator"), look)
        running = asyncio.ensure_future(one.run())
        while not (pids.exists() and pids.read_text().count("\n") == 2):
            await asyncio.sleep(0.01)
        await one.close()
        running.cancel()

    asyncio.run(life())
    left = {int(pid) for pid in pids.read_text().split()}
    until = time.monotonic() + 60
    while any(is_alive(pid) for pid in left) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in left)


def is_alive(pid):
    """A zombie whose parent has not asked yet is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_book_that_cannot_be_written_tells_nothing_twice(tmp_path, caplog):
    async def life():
        with http_server() as server:
            one = notices(tmp_path / "gone", server.url)
            await one.look()
            return server.bodies

    assert asyncio.run(life()) == []
    assert "notices cannot be recorded" in caplog.text


def test_a_damaged_book_is_begun_anew(tmp_path):
    (tmp_path / FILE).write_text('{"told": 7}')
    assert notices_shown(tmp_path) == []
    assert notices(tmp_path).book.is_new
