// Zoom of curves: a dialog in which uPlot draws the values of a figure's lines; buttons and keys do what a mouse does.
const box = document.createElement("dialog");
box.className = "zoomed";
box.setAttribute("aria-labelledby", "zoomed-title");
box.innerHTML = `<h2 id="zoomed-title"></h2><p class="names"></p><div class="plot"></div><p role="status"></p>
<p class="steps"><button data-step="in">Closer</button> <button data-step="out">Wider</button>
<button data-step="left">Left</button> <button data-step="right">Right</button> <button data-step="all">All</button>
<button data-step="close">Close</button></p>`;
document.body.append(box);
document.documentElement.classList.add("has-zoom");

const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all" };
const WHOLE = [1, 2, 5].flatMap(one => [...Array(10)].map((_, power) => one * 10 ** power)).sort((a, b) => a - b);
let figure = null, plot = null, whole = [0, 1];

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = value => Number(value.toPrecision(4)).toString();

// Return the values of a curve: the points of its lines, mapped back; null is a gap between two lines.
function table(curve, svg) {
  const [left, right, low, high, bottom, top, least, most] = svg.dataset.scale.split(" ").map(Number);
  const isWhole = "whole" in svg.dataset, xs = [], ys = [];
  for (const line of curve.querySelectorAll("polyline")) {
    let isFirst = xs.length > 0;
    for (const point of line.getAttribute("points").split(" ")) {
      const [across, up] = point.split(",").map(Number);
      const exact = low + (across - left) / (right - left) * (high - low), x = isWhole ? Math.round(exact) : exact;
      if (x === xs.at(-1)) continue;
      if (isFirst) { xs.push((xs.at(-1) + x) / 2); ys.push(null); isFirst = false; }
      xs.push(x);
      ys.push(least + (up - bottom) / (top - bottom) * (most - least));
    }
  }
  return [xs, ys];
}

function data() {
  const svg = figure.querySelector("svg.curves");
  return uPlot.join([...svg.querySelectorAll("g.curve")].map(curve => table(curve, svg)));
}

function size() {
  return { width: Math.min(1200, innerWidth - 64), height: Math.max(160, Math.min(520, innerHeight - 260)) };
}

function draw() {
  const svg = figure.querySelector("svg.curves"), values = data();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--edge") }, ticks: { stroke: colour("--edge") } };
  const series = [...svg.querySelectorAll("g.curve")].map(curve => {
    const line = curve.querySelector("polyline"), dash = line.getAttribute("stroke-dasharray");
    return { stroke: getComputedStyle(line).stroke, width: 2, dash: dash ? dash.split(" ").map(Number) : undefined };
  });
  whole = [values[0][0], values[0].at(-1)];
  plot = new uPlot({
    ...size(),
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, ...("whole" in svg.dataset ? { incrs: WHOLE } : {}) }, { ...axis, size: 76 }],
    series: [{}, ...series],
    hooks: { setScale: [(_, name) => { if (name === "x") say(); }] },
  }, values, box.querySelector(".plot"));
}

function say() {
  if (plot?.scales.x.min == null) return; // uPlot sets it a moment after the picture is made
  const { min, max } = plot.scales.x, names = [...figure.querySelectorAll("g.curve")].map(one => one.dataset.name);
  const parts = names.map((name, number) => {
    const seen = plot.data[number + 1].filter((y, at) => y != null && plot.data[0][at] >= min && plot.data[0][at] <= max);
    return seen.length ? `${name} ${shown(Math.min(...seen))} to ${shown(Math.max(...seen))}` : `${name} has no value`;
  });
  box.querySelector("[role=status]").textContent = `${figure.dataset.over} ${shown(min)} to ${shown(max)}: ${parts.join(", ")}`;
}

function step(what) {
  if (what === "close") { box.close(); return; }
  const { min, max } = plot.scales.x, span = max - min, all = whole[1] - whole[0];
  const wide = { in: span / 2, out: Math.min(all, span * 2), all }[what] ?? span;
  const moved = { left: -span / 4, right: span / 4 }[what] ?? 0, middle = (min + max) / 2 + moved;
  const first = Math.max(whole[0], Math.min(whole[1] - wide, middle - wide / 2));
  if (wide > all / 1e6) plot.setScale("x", { min: first, max: first + wide });
}

function load(tag, attributes) {
  return new Promise((done, failed) => {
    const one = Object.assign(document.createElement(tag), attributes, { onload: done, onerror: failed });
    document.head.append(one);
  });
}

async function open(button) {
  if (typeof uPlot === "undefined") {
    await Promise.all([
      load("link", { rel: "stylesheet", href: "/static/uplot.min.css" }), load("script", { src: "/static/uplot.min.js" }),
    ]);
  }
  figure = button.closest("figure");
  box.querySelector("h2").textContent = figure.dataset.title;
  box.querySelector(".names").replaceChildren(...[...figure.querySelectorAll(".legend")].map(one => one.cloneNode(true)));
  box.showModal();
  draw();
}

document.addEventListener("click", event => {
  const button = event.target.closest?.("button.zoom, [data-step]");
  if (button?.dataset.step) step(button.dataset.step); else if (button) open(button);
});
box.addEventListener("keydown", event => {
  if (KEYS[event.key] && plot) { event.preventDefault(); step(KEYS[event.key]); }
});
box.addEventListener("close", () => { plot?.destroy(); plot = null; });
addEventListener("resize", () => plot?.setSize(size()));
document.addEventListener("changed", () => { // the page has changed under the dialog: its values are drawn, its range stays
  if (!plot) return;
  if (!figure.isConnected) { box.close(); return; }
  const { min, max } = plot.scales.x, isAll = min <= whole[0] && max >= whole[1], values = data();
  if (values.length !== plot.data.length) { box.close(); return; }
  whole = [values[0][0], values[0].at(-1)];
  plot.setData(values, isAll);
  if (!isAll) plot.setScale("x", { min, max });
});
