"""Every page in Chromium: in light and dark, narrow and wide, by keyboard, with and without JavaScript."""

from itertools import product

import pytest

from benchmarks.pages import kind
from tests.cli.federation import Federation, wait_for
from tests.dashboard.browser.looking import FOCUSABLE, NO_NAME, Look, of_few, tabbed, until

pytestmark = pytest.mark.long

PAGES = (
    "/",
    "/members/#",
    "/runs/#/*",
    "/runs/#/*/rounds",
    "/runs/#/*/rounds/#",
    "/runs/#/*/sites",
    "/runs/#/*/site name",
)
WIDTHS, SCHEMES = (320, 1920), ("light", "dark")

AXE = """axe.run(document, { resultTypes: ["violations"] })
  .then(found => found.violations.map(one => [one.id, one.nodes.slice(0, 3).map(node => node.html)]))"""

PARTS = """[...document.querySelectorAll("main :is(h1, h2, a, dt, th, td, li, label, option, polyline, rect)")]
  .filter(one => !one.closest("section")?.querySelector(".log"))
  .map(one => [one.localName, one.getAttribute("href"), /[0-9]/.test(one.textContent) || one.textContent])"""
"""What a page has, without numbers, as a page may have been read a second later, and without the log of a run, which
nobody follows before a page with scripts is open."""

WATCH = """selector => {
  const wanted = [...document.querySelectorAll(selector)].filter(one => one.checkVisibility());
  window.left = new Set(wanted);
  window.unseen = [];
  addEventListener("focusin", event => {
    window.left.delete(event.target);
    const style = getComputedStyle(event.target);
    if (style.outlineStyle === "none") window.unseen.push(event.target.outerHTML.slice(0, 200));
  });
  return wanted.length;
}"""


def test_the_crawl_finds_the_known_kinds_of_pages(addresses: list[str]) -> None:
    found = {"/".join("#" if part.isdigit() else part for part in kind(one).split("/")) for one in addresses}
    assert found.issuperset(PAGES), found


@pytest.mark.timeout(3600)  # axe-core takes seconds for a page, beside busy neighbours ten times as many
@pytest.mark.parametrize("has_scripts", [True, False], ids=["with scripts", "without"])
def test_no_page_has_a_fault(look: Look, addresses: list[str], axe: str, has_scripts: bool) -> None:
    faults = []
    with look.context() as context:
        if not has_scripts:  # axe-core itself needs scripts: those of the page are empty
            nothing = {"content_type": "text/javascript", "body": ""}
            context.route("**/static/*.js", lambda route: route.fulfill(**nothing))
        page = context.new_page()
        for address in addresses:
            page.goto(look.base + of_few(address), wait_until="load")
            page.evaluate(axe)
            for width, scheme in product(WIDTHS, SCHEMES) if has_scripts else zip(WIDTHS, SCHEMES, strict=True):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                faults += [(address, width, scheme, *violation) for violation in page.evaluate(AXE)]
                if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
                    faults.append((address, width, scheme, f"needs {needed} pixels"))
    assert faults == []
    assert look.taken() == []


def test_a_page_is_complete_without_scripts(look: Look, addresses: list[str]) -> None:
    settled = [
        address
        for address in addresses
        if not address.startswith(("/runs/1/", "/members/1", "/?", "/audit", "/decisions"))
    ]
    parts = dict[str, list[object]]()
    for has_scripts in (True, False):
        with look.context(java_script_enabled=has_scripts) as context:
            page = context.new_page()
            for address in settled:
                page.goto(look.base + address, wait_until="load")
                assert page.title().endswith("Atoll")
                parts.setdefault(address, []).append(page.evaluate(PARTS))
    assert len(parts) > 5
    assert [address for address, (with_scripts, without) in parts.items() if with_scripts != without] == []


def test_every_function_is_reached_by_keyboard(look: Look, addresses: list[str]) -> None:
    faults = []
    with look.context() as context:
        page = context.new_page()
        for address in addresses:
            page.goto(look.base + address, wait_until="load")
            wanted = page.evaluate(WATCH, FOCUSABLE)
            for _ in range(2 * wanted + 20):
                page.keyboard.press("Tab")
                if not page.evaluate("[...window.left].filter(one => one.isConnected).length"):
                    break
            left = page.evaluate("[...window.left].filter(one => one.isConnected).map(one => one.outerHTML)")
            faults += [(address, "not reached", one) for one in left[:3]]
            faults += [(address, "focus is not seen", one) for one in page.evaluate("window.unseen")[:3]]
    assert faults == []
    assert look.taken() == []


def test_forms_folds_and_links_work_by_keyboard(look: Look, addresses: list[str]) -> None:
    tried = {"form": 0, "fold": 0, "scroll": 0}
    with look.context(viewport={"width": 600, "height": 700}) as context:
        page = context.new_page()
        for address in addresses:
            page.goto(look.base + address, wait_until="load")
            if page.locator("details summary").count():
                page.locator("details summary").first.focus()
                page.keyboard.press("Enter")
                assert page.locator("details").first.get_attribute("open") is not None, address
                tried["fold"] += 1
            regions = page.locator(".scroll[tabindex='0']")
            for number in range(regions.count()):
                region = regions.nth(number)
                if region.evaluate("one => one.scrollWidth > one.clientWidth + 8"):
                    region.focus()
                    page.keyboard.press("ArrowRight")
                    until(page, "one => one.scrollLeft > 0", region.element_handle())
                    tried["scroll"] += 1
            if page.locator("form[method=get] input:not([type=hidden])").count():
                one = page.locator("form[method=get] input:not([type=hidden])").first
                name = one.get_attribute("name")
                one.focus()
                page.keyboard.press("Control+A")
                page.keyboard.type(NO_NAME)
                with page.expect_navigation():
                    page.keyboard.press("Enter")
                assert f"{name}={NO_NAME}" in page.url
                tried["form"] += 1
        page.goto(look.base, wait_until="load")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.id === 'main'")
        page.keyboard.press("Tab")
        while not page.evaluate("document.activeElement.matches('tbody a')"):  # past the box of a comparison
            page.keyboard.press("Tab")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert "/runs/" in page.url
    assert min(tried.values()) > 0, tried
    assert look.taken() == []


@pytest.mark.parametrize("has_scripts", [True, False], ids=["with scripts", "without"])
def test_a_run_is_paused_and_resumed_by_keyboard_alone(look: Look, running: Federation, has_scripts: bool) -> None:
    with look.context(java_script_enabled=has_scripts) as context:
        page = context.new_page()
        address = look.lasting(page)
        run = address.rpartition("/")[2]
        for act, wanted, state in (("pause", "input:not([type=hidden])", "paused"), ("resume", "button", "running")):
            page.goto(look.base + address, wait_until="load")
            tabbed(page, f"a[href='{address}/control']")
            with page.expect_navigation():
                page.keyboard.press("Enter")
            tabbed(page, f"form[action='{address}/control/{act}'] {wanted}")
            if act == "pause":
                page.keyboard.type("to look")
            with page.expect_navigation():
                page.keyboard.press("Enter")
            assert page.locator("h1").inner_text() == "Done"
            wait_for(lambda state=state: running.run_state(run) == state)
    assert look.taken() == []
