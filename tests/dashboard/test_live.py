"""The news of runs, with followers of made-up events: counted, told once, ended when nobody looks."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atoll.dashboard import live
from atoll.dashboard.live import FOLLOWED_MAX, Followed, Live, Pictures
from atoll.interface.errors import AtollError
from atoll.interface.following import Event


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PICTURE_S", 0.0), ("AGAIN_S", 0.0), ("IDLE_S", 0.0), ("ALIVE_S", 60.0)):
        monkeypatch.setattr(live, name, seconds)


class Run:
    """A run whose events a test sends; an error in their place ends the following with it."""

    def __init__(self) -> None:
        self.run_id = "a"
        self.events: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        self.asked_after: list[int | None] = []

    async def afollow(self, *, after: int | None = None) -> AsyncIterator[Event]:
        self.asked_after.append(after)
        while (item := await self.events.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield Event(item)

    def send(self, seq: int, kind: str = "event", **more: Any) -> None:
        self.events.put_nowait({"kind": kind, "seq": seq, "at": float(seq), "run": None, **more})


def of(runs: dict[str, Run]) -> Live:
    def opened(key: str) -> Any:
        if key not in runs:
            raise AtollError(f"there is no run {key!r}")
        return runs[key]

    return Live(opened)


async def next_of(stream: AsyncIterator[str]) -> dict[str, Any]:
    """Return the next news of a stream."""
    text = await anext(stream)
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    found: dict[str, Any] = json.loads(text.removeprefix("data: "))
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_news_are_told_once_with_the_lines_of_the_log() -> None:
    async def scene() -> None:
        run = Run()
        here = of({"1/r": run})
        stream = here.stream(["1/r", "1/r"])
        assert await next_of(stream) == {"run": "1/r", "news": 0, "fault": ""}
        followed = here.of("1/r")
        assert followed is not None
        run.send(1, "began")
        run.send(2, lines=["a line"])
        run.send(3, lines=["another"])
        await until(lambda: followed.news == 3)
        assert await next_of(stream) == {"run": "1/r", "news": 3, "fault": ""}
        assert [*followed.lines] == [(2.0, "a line"), (3.0, "another")]
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: here.of("1/r") is None)

    asyncio.run(scene())


def test_an_ended_run_is_followed_again_after_its_last_entry() -> None:
    async def scene() -> None:
        run = Run()
        here = of({"1/r": run})
        stream = here.stream(["1/r"])
        await next_of(stream)
        followed = here.of("1/r")
        assert followed is not None
        run.send(7, "began")
        run.events.put_nowait(None)
        await until(lambda: len(run.asked_after) == 2)
        assert run.asked_after == [None, 7]
        run.send(7, "began")
        run.send(8)
        await until(lambda: followed.news == 2)
        assert followed.seq == 8, "the same beginning is no news"
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


def test_a_fault_is_told_and_ends() -> None:
    async def scene() -> None:
        run = Run()
        stream = of({"1/r": run}).stream(["1/r"])
        await next_of(stream)
        run.events.put_nowait(AtollError("no answer"))
        assert (await next_of(stream))["fault"] == "no answer"
        run.send(1, "began")
        assert (await next_of(stream))["fault"] == ""
        run.send(1, "waiting", why="the coordinator is away; trying again")
        assert (await next_of(stream))["fault"].startswith("the coordinator is away")
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


def test_a_bug_in_a_follower_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        run = Run()
        run.events.put_nowait(ZeroDivisionError("a bug"))
        stream = of({"1/a": run}).stream(["1/a"])
        assert (await next_of(stream))["fault"] == ""
        assert "the log of the dashboard says why" in (await next_of(stream))["fault"]
        run.send(1, "began")
        assert (await next_of(stream))["fault"] == "", "it is followed again"
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())
    assert "ZeroDivisionError" in caplog.text


def test_two_streams_share_a_follower_which_ends_after_the_last() -> None:
    async def scene() -> None:
        run = Run()
        here = of({"1/r": run})
        first, second = here.stream(["1/r"]), here.stream(["1/r"])
        await next_of(first)
        await next_of(second)
        run.send(1, "began")
        assert (await next_of(first))["news"] == (await next_of(second))["news"] == 1
        assert len(run.asked_after) == 1
        await first.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
        assert here.of("1/r") is not None
        await second.aclose()  # type: ignore[attr-defined]
        await until(lambda: here.of("1/r") is None)

    asyncio.run(scene())


def test_too_many_runs_and_unknown_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "IDLE_S", 60.0)

    async def scene() -> None:
        runs = {f"1/r-{number}": Run() for number in range(FOLLOWED_MAX + 1)}
        here = of(runs)
        *some, last = runs
        unknown = here.stream(["1/none"])
        assert (await next_of(unknown))["fault"] == "there is no run '1/none'"
        await unknown.aclose()  # type: ignore[attr-defined]
        streams = [here.stream([key]) for key in some]
        for stream in streams:
            await next_of(stream)
        refused = here.stream([last])
        assert "8 runs are followed already" in (await next_of(refused))["fault"]
        await refused.aclose()  # type: ignore[attr-defined]
        await streams[0].aclose()  # type: ignore[attr-defined]
        another = here.stream([last])
        assert (await next_of(another))["fault"] == "", "one that nobody looks at makes room at once"
        assert here.of(some[0]) is None
        for stream in [*streams[1:], another]:
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


def test_all_who_look_share_one_rendering_until_there_are_news() -> None:
    async def scene() -> None:
        times = iter(range(0, 10_000))
        pictures, one = Pictures(lambda: next(times) * 0.01), Followed(Run())  # type: ignore[arg-type]
        rendered: list[int] = []

        async def render() -> str:
            rendered.append(one.news)
            await asyncio.sleep(0)
            return f"page {one.news}"

        pages = await asyncio.gather(*(pictures.picture("/r", one, render) for _ in range(10)))
        assert pages == ["page 0"] * 10
        one.news = 5
        assert await pictures.picture("/r", one, render) == "page 5"
        assert await pictures.picture("/r", one, render) == "page 5"
        assert rendered == [0, 5]
        for _ in range(300):
            next(times)
        await pictures.picture("/r", one, render)
        assert rendered == [0, 5, 5], "after some seconds it is read again"

    asyncio.run(scene())
