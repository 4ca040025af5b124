"""What is seen of the pages in a browser: their addresses, faults of access, scripts and requests."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import BOUND_S

UNREADABLE = "/runs/4/sweep~1torn"
"""The address of the run that cannot be read: its page says why, with status 404."""

NO_NAME = "zz"
"""A name that no run and no member has."""

FOCUSABLE = (
    "a[href], button:not(:disabled), input:not([type=hidden]):not(:disabled), select:not(:disabled), "
    "textarea:not(:disabled), summary, [tabindex]:not([tabindex='-1'])"
)


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until an expression of the page is true: playwright's waiting evaluates texts, which the policy forbids."""
    end = time.monotonic() + BOUND_S
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"{page.url}: {expression}"
        page.wait_for_timeout(50)


def tabbed(page: Any, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{page.url}: {selector} is not reached")


def of_few(address: str) -> str:
    """Return the address of the same page with few rows: axe-core takes seconds for a hundred."""
    return f"{address}{'&' if '?' in address else '?'}count=12"


@dataclass
class Look:
    """A browser's session with a dashboard.

    Args:
        browser: the browser.
        base: the origin of the dashboard.
        cookie: the cookie of the session.
    """

    browser: Any
    base: str
    cookie: dict[str, Any]
    complaints: list[str] = field(default_factory=list)
    """Lines of the console, errors of scripts, and requests that go outside."""

    @contextmanager
    def context(self, **options: Any) -> Iterator[Any]:
        """A window of the browser, whose complaints are noted; options as playwright has them."""
        context = self.browser.new_context(**options)
        context.add_cookies([self.cookie])
        context.on("console", self._read)
        context.on("weberror", lambda error: self.complaints.append(f"{error.page.url}: {error.error}"))
        context.on("request", self._note)
        try:
            yield context
        finally:
            context.close()

    def _read(self, message: Any) -> None:
        is_known = UNREADABLE in message.page.url or f"={NO_NAME}" in message.page.url
        if not is_known or "status of 404" not in message.text:
            self.complaints.append(f"{message.page.url}: {message.text}")

    def _note(self, request: Any) -> None:
        if not request.url.startswith((f"{self.base}/", "data:")):
            self.complaints.append(f"a request outside: {request.url}")

    def lasting(self, page: Any) -> str:
        """Open the page of all runs, and return the address of the run that lasts, as its link has it."""
        page.goto(self.base, wait_until="load")
        found: str = page.locator("a[href^='/runs/1/']").first.get_attribute("href")
        return found

    def taken(self) -> list[str]:
        """Return the complaints so far, each once, and forget them."""
        found, self.complaints = [*dict.fromkeys(self.complaints)], []
        return found
