// Live change: at news of its run a tab reads its own page again, and morphs what differs; focus and scroll stay.
const LEAST_MS = 250;
const run = document.body.dataset.run, every = Number(document.body.dataset.every || 0);
let seen = null, isReading = false, isDue = false, lastAt = 0;

const chip = document.createElement("p");
chip.className = "live";
chip.setAttribute("role", "status");
document.querySelector("header").append(chip);

function say(text, isLive) {
  const shown = (isLive ? "● " : "○ ") + text;
  if (chip.textContent !== shown) chip.textContent = shown;
  chip.classList.toggle("is-live", isLive);
}

async function read() {
  if (document.hidden) { isDue = true; return; }
  if (isReading) { isDue = true; return; }
  isReading = true;
  isDue = false;
  await new Promise(done => setTimeout(done, Math.max(0, lastAt + LEAST_MS - Date.now())));
  lastAt = Date.now();
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (answer.status === 403) { say("the session has ended: atoll dashboard link", false); return; }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const chosen = new Set(Array.from(document.querySelectorAll("input:checked"), box => box.value));
    Idiomorph.morph(document.querySelector("main"), page.querySelector("main"), {
      ignoreActiveValue: ["INPUT", "SELECT"].includes(document.activeElement?.tagName), // else its children would stay
      callbacks: { beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS") },
    });
    for (const box of document.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
    document.title = page.title;
    if (every) say("live", true);
  } catch {
    say("the dashboard does not answer", false);
  } finally {
    isReading = false;
    if (isDue) read();
  }
}

function take(message) {
  if (message.kind === "away") { say("the dashboard does not answer", false); return; }
  const { run: key, news, fault } = message.news;
  if (key !== run) return;
  say(fault || "live", !fault);
  const isFirst = seen === null;
  if (news !== seen) {
    seen = news;
    if (!isFirst || news > 0 || news < 0) read();
  }
}

function listen() {
  if (typeof SharedWorker !== "undefined") {
    const { port } = new SharedWorker("/static/streams.js");
    port.onmessage = ({ data }) => take(data);
    port.postMessage({ run });
    addEventListener("pagehide", () => port.postMessage({ run: "" }));
    addEventListener("pageshow", event => { if (event.persisted) port.postMessage({ run }); });
    return;
  }
  const source = new EventSource("/live?run=" + encodeURIComponent(run));
  source.onmessage = event => take({ kind: "news", news: JSON.parse(event.data) });
  source.onerror = () => take({ kind: "away" });
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && isDue) read(); });
if (run) listen();
else if (every) { say("live", true); setInterval(read, every * 1000); }
