"""The run, the round and the site of a line of the log."""

import asyncio
import logging

from atoll.protocol.log_fields import about, context_about, fields_of
from atoll.protocol.threads import on_thread
from tests.client.fake_coordinator import live


def line(**extra):
    return fields_of(logging.makeLogRecord(extra))


def test_a_line_has_the_fields_of_the_work_around_it_and_its_own_first():
    assert line() == {}
    with about(run="r-1", round=3):
        assert line() == {"run": "r-1", "round": 3}
        assert line(round=4, site="north") == {"site": "north", "run": "r-1", "round": 4}
        with about(round=None):
            assert line() == {"run": "r-1"}
    assert line(site="") == {}


@live
async def test_tasks_and_threads_that_the_work_begins_have_its_fields():
    async def task():
        return line(), await on_thread(None, line)

    with about(run="r-1"):
        begun = asyncio.ensure_future(task())
    apart = asyncio.get_running_loop().create_task(task(), context=context_about(run="r-2", round=1))
    assert line() == {}
    assert await begun == ({"run": "r-1"}, {"run": "r-1"})
    assert await apart == ({"run": "r-2", "round": 1},) * 2
