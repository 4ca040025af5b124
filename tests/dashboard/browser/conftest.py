"""Debian's Chromium and a dashboard to look at; `make browser-test` installs what the tests need beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from atoll.interface.errors import AtollError
from atoll.interface.places import place
from benchmarks.pages import crawled
from tests.cli.federation import Federation, federation, start_run, wait_for
from tests.dashboard.browser.looking import UNREADABLE, Look
from tests.dashboard.test_process import dashboard, get

CHROMIUM = Path("/usr/bin/chromium")
PACKAGES = {"playwright": "playwright", "axe_playwright_python": "axe-playwright-python"}


def missing() -> list[str]:
    """Return what the tests need and this machine lacks."""
    packages = [name for module, name in PACKAGES.items() if find_spec(module) is None]
    return packages + ([] if CHROMIUM.exists() else [f"{CHROMIUM} (apt-get install chromium)"])


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return the browser."""
    if lacking := missing():
        pytest.skip(f"without {', '.join(lacking)}: `make browser-test` installs the packages")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the script of axe-core."""
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "axe.min.js").read_text("utf-8")


@contextmanager
def looked_at(browser: Any, *shown: str, home: Path, has_forms: bool = True) -> Iterator[Look]:
    """A dashboard of some places, and a session of the browser with it."""
    forms = ["--control"] if has_forms else []
    with dashboard(*shown, *forms, home=home) as (_, link):
        base, _, path = link.partition("/login")
        name, _, value = get(link, f"/login{path}")[1].partition("=")
        yield Look(browser, base, {"name": name, "value": value, "url": base, "httpOnly": True, "sameSite": "Strict"})


def is_place(text: str) -> bool:
    """Return whether a dashboard shows this place."""
    try:
        place(text)
    except AtollError:
        return False
    return True


@pytest.fixture(scope="session")
def running(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation of two agents with a run that lasts, after its first versions."""
    with federation(tmp_path_factory.mktemp("running")) as it:
        run = start_run(it, "lasting", "rounds=100000", "pause=3.0", "round.min_available=2")["run"]
        wait_for(lambda: "committed as version 3" in it.log("coordinator") or None)
        assert it.run_state(run) == "running"
        yield it


@pytest.fixture(scope="session")
def look(
    chromium: Any, running: Federation, places: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Look]:
    """Return a dashboard of a coordinator that runs, of one that does not, of simulations, and of a site."""
    more = [text for text in (str(running.folder / "atoll-agent-a"),) if is_place(text)]
    home = tmp_path_factory.mktemp("home")
    with looked_at(chromium, str(running.state), *places, *more, home=home) as found:
        yield found


@pytest.fixture(scope="session")
def addresses(look: Look) -> list[str]:
    """Return an address of each kind of page in each place, found by their links."""
    cookie = f"{look.cookie['name']}={look.cookie['value']}"

    def read(address: str) -> bytes:
        status, _, page = get(look.base, address, cookie)
        assert status == 200 or address == UNREADABLE, (address, status, page)
        return page.encode()

    return crawled(read)
