"""Zoom of curves in Chromium: the values of the run, by keyboard and by mouse, while the page changes."""

import json
from typing import Any

import pytest

from tests.dashboard.browser.looking import Look, until
from tests.dashboard.test_process import get

pytestmark = pytest.mark.long

RUN = "/runs/3/many-1"
DRAWN = "(() => { const p = window.plotted(); return p ? [p.scales.x.min, p.scales.x.max, p.data] : null; })()"

SPY = """
Object.defineProperty(window, "uPlot", {
  configurable: true,
  set(made) {
    let newest = null;
    window.plotted = () => newest;
    const spied = new Proxy(made, { construct: (one, options) => (newest = new one(...options)) });
    Object.defineProperty(window, "uPlot", { value: spied });
  },
});
"""
"""Keeps the newest picture of uPlot, which no name of the page leads to."""


@pytest.fixture
def page(look: Look) -> Any:
    """Return a page that has curves."""
    with look.context(viewport={"width": 1000, "height": 800}) as context:
        context.add_init_script(SPY)
        page = context.new_page()
        page.goto(look.base + RUN, wait_until="load")
        yield page
        assert look.taken() == [], "the policy allows all that uPlot does"


def opened(page: Any) -> None:
    """Open the zoom of the first curve by keyboard."""
    page.locator("button.zoom").first.focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelector('dialog[open] [role=status]')?.textContent")


def test_the_values_are_those_of_the_run(look: Look, page: Any) -> None:
    opened(page)
    metrics = json.loads(get(look.base, f"{RUN}.json", f"{look.cookie['name']}={look.cookie['value']}")[2])["metrics"]
    wanted = {int(version): sources["server"]["accuracy"] for version, sources in metrics.items()}
    _, _, (xs, ys) = page.evaluate(DRAWN)
    assert dict(zip(xs, ys, strict=True)) == {x: pytest.approx(y, abs=1e-4) for x, y in wanted.items()}


def test_keys_and_buttons_move_within_the_values(page: Any) -> None:
    opened(page)
    first, last, _ = page.evaluate(DRAWN)

    def span(key: str) -> tuple[float, float]:
        page.keyboard.press(key)
        low, high, _ = page.evaluate(DRAWN)
        assert first <= low < high <= last
        return low, high

    low, high = span("+")
    assert high - low == pytest.approx((last - first) / 2)
    assert span("ArrowLeft")[0] < low
    assert span("ArrowRight") == pytest.approx((low, high))
    assert page.locator("dialog [role=status]").inner_text().startswith(f"version {low:.4g} to {high:.4g}: server 0.")
    assert span("-") == (first, last)
    for _ in range(40):
        span("+")
    assert span("0") == (first, last)
    for word in ("Closer", "Wider", "Left", "Right", "All", "Close"):
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement.textContent") != word:
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
    assert not page.locator("dialog[open]").count()
    assert page.evaluate("document.activeElement.className") == "zoom", "the focus is where it was"


def test_a_mouse_draws_a_range_and_escape_ends_it(page: Any) -> None:
    opened(page)
    first, last, _ = page.evaluate(DRAWN)
    area = page.locator("dialog .u-over").bounding_box()
    page.mouse.move(area["x"] + area["width"] / 4, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] / 2, area["y"] + 60)
    page.mouse.up()
    low, high, _ = page.evaluate(DRAWN)
    assert low == pytest.approx(first + (last - first) / 4, abs=2)
    assert high == pytest.approx((first + last) / 2, abs=2)
    page.keyboard.press("Escape")
    assert not page.locator("dialog[open]").count()
    assert not page.locator("canvas").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1920])
def test_the_dialog_has_no_fault(page: Any, axe: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.emulate_media(color_scheme=scheme)
    opened(page)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document.querySelector('dialog')).then(found => found.violations.map(o => o.id))")
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("dialog").bounding_box()["width"] <= width


def test_the_picture_follows_a_run(look: Look) -> None:
    with look.context() as context:
        context.add_init_script(SPY)
        page = context.new_page()
        page.goto(look.base + look.lasting(page), wait_until="load")
        opened(page)
        before = page.evaluate(DRAWN)[1]
        until(page, f"before => ({DRAWN})[1] > before", before)
        page.keyboard.press("+")
        span = page.evaluate(DRAWN)[:2]
        newest = page.evaluate(f"({DRAWN})[2][0].at(-1)")
        until(page, f"newest => ({DRAWN})[2][0].at(-1) > newest", newest)
        assert page.evaluate(DRAWN)[:2] == span, "a chosen range stays"
    assert look.taken() == []
