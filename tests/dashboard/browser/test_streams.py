"""The worker that shares one stream among the tabs of a browser, with a made-up stream."""

from pathlib import Path
from typing import Any

from atoll import dashboard

WORKER = Path(dashboard.__file__).parent / "static" / "streams.js"

SCENE = """
(text) => {
  const opened = [], said = [];
  class EventSource {
    static CLOSED = 2;
    readyState = 1;
    constructor(address) { opened.push(this); this.address = address; }
    close() { this.readyState = 2; }
  }
  const connect = new Function("EventSource", `let onconnect; ${text}; return onconnect;`)(EventSource);
  const tab = () => {
    const port = { postMessage: message => said.push(message.kind) };
    connect({ ports: [port] });
    port.onmessage({ data: { run: "1/r" } });
  };
  const fail = state => { opened[0].readyState = state; opened[0].onerror({ target: opened[0] }); };
  tab();
  fail(0);
  tab();
  const connecting = opened.length;
  fail(2);
  tab();
  return [connecting, opened.length, opened[1].address, said];
}
"""
"""A stream that connects again, then one that was refused, as the session has ended; each with a new tab after it."""


def test_a_new_tab_opens_a_refused_stream_again(chromium: Any) -> None:
    page = chromium.new_page()
    try:
        found = page.evaluate(SCENE, WORKER.read_text("utf-8"))
    finally:
        page.close()
    assert found == [1, 2, "/live?run=1%2Fr", ["away", "news", "away", "away"]]
