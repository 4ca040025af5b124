"""A dashboard as a process, a session with it, and the addresses of its pages, found by its links."""

import html
import re
import time
from collections import deque
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import parse_qsl, urlsplit

from benchmarks.processes import ATOLL, START_TIMEOUT_S, NotMeasured, Processes

LINK = re.compile(rb"<a\b[^>]*?\shref=\"([^\"]+)\"")
TIMEOUT_S = 120.0


def kind(address: str) -> str:
    """Return an address without names of runs, numbers of rounds and values of a query, but with its place."""
    parts = urlsplit(address)
    segments = ["#" if part.isdigit() and at > 2 else part for at, part in enumerate(parts.path.split("/"))]
    if segments[1:2] == ["runs"] and len(segments) > 3:
        segments[3] = "*"
    return "/".join(segments) + "".join(f" {name}" for name, _ in sorted(parse_qsl(parts.query)))


def crawled(read: Callable[[str], bytes]) -> list[str]:
    """Return the addresses to which links lead from `/` on, the nearest first, one of each kind.

    Args:
        read: returns the page at an address.
    """
    found, known, due = list[str](), {kind("/")}, deque(["/"])
    while due:
        address = due.popleft()
        found.append(address)
        for href in LINK.findall(read(address)):
            following = html.unescape(href.decode()).partition("#")[0]
            if following.startswith("/") and kind(following) not in known:
                known.add(kind(following))
                due.append(following)
    return found


class Session:
    """A session with a dashboard.

    Args:
        link: a link that it has printed, and that was not used.
    """

    def __init__(self, link: str) -> None:
        self._netloc = urlsplit(link).netloc
        answer = self._asked(link.partition(self._netloc)[2])
        answer.read()
        self.cookie = (answer.getheader("set-cookie") or "").partition(";")[0]

    def read(self, address: str) -> bytes:
        """Return the page at an address.

        Raises:
            NotMeasured: there is none.
        """
        answer = self._asked(address, self.cookie)
        found = answer.read()
        if answer.status != 200:
            raise NotMeasured(f"{address} answers {answer.status}: {found[:500]!r}")
        return found

    def stream(self, run: str) -> Callable[[], bytes]:
        """Return a function that reads the next line of the stream of a run's news."""
        return self._asked(f"/live?run=1/{run}", self.cookie).readline

    def _asked(self, address: str, cookie: str = "") -> HTTPResponse:
        connection = HTTPConnection(self._netloc, timeout=TIMEOUT_S)
        connection.request("GET", address, headers={"Cookie": cookie, "Connection": "close"})
        return connection.getresponse()


def start_dashboard(processes: Processes, name: str, place: object) -> str:
    """Start a dashboard of a place, and return its link."""
    log = processes.log(name)
    log.unlink(missing_ok=True)
    environment = {"XDG_RUNTIME_DIR": str(processes.folder)}
    processes.start(name, [ATOLL, "dashboard", str(place), "--listen", "127.0.0.1:0"], environment)
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and processes.running[name].poll() is None:
        if found := [line for line in log.read_text().splitlines() if line.startswith("http://")]:
            return found[0].strip()
        time.sleep(0.02)
    raise NotMeasured(f"{name} does not listen:\n{processes.last_words(name)}")
