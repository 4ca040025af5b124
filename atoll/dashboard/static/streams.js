// One stream for all tabs of a browser: HTTP/1.1 allows six connections to a host.
const ports = new Map(); // port -> key of its run
let source = null, followed = "";

function open() {
  const keys = [...new Set(ports.values())].sort();
  const wanted = keys.join("\n");
  if (wanted === followed) return;
  followed = wanted;
  if (source) source.close();
  source = null;
  if (!keys.length) return;
  source = new EventSource("/live?" + keys.map(key => "run=" + encodeURIComponent(key)).join("&"));
  source.onmessage = event => tell({ kind: "news", news: JSON.parse(event.data) });
  source.onerror = event => {
    if (event.target === source && source.readyState === EventSource.CLOSED) followed = ""; // refused: the next page opens it
    tell({ kind: "away" });
  };
}

function tell(message) {
  for (const port of ports.keys()) port.postMessage(message);
}

onconnect = event => {
  const port = event.ports[0];
  port.onmessage = ({ data }) => {
    if (data.run) ports.set(port, data.run); else ports.delete(port);
    const before = followed;
    open();
    if (data.run && before === followed) port.postMessage({ kind: "news", news: { run: data.run, news: -1, fault: "" } });
  };
};
