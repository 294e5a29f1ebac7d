// Shows the values of a chart under the pointer, under a finger, or at the place that the arrow keys chose.
//
// The server sends the values in `data-chart` (see `curves.py`). The hairline and the values are elements outside of
// the parts of the page that are made anew every two seconds, so that they stay while these change.

import { say } from "./live.js";

const hair = document.getElementById("hair");
const values = document.getElementById("values");
let shown = null; // the chart that values are shown of, where (from 0 to 1), and the chart's top on the screen

const amount = (value) =>
  Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  return `${Number((seconds / 3600).toPrecision(3))} h ago`;
}

/** The x of all points of a chart, in order. */
const places = (data) =>
  [...new Set(data.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);

const share = (data, x) => (data.high > data.low ? (x - data.low) / (data.high - data.low) : 0.5);

function nearest(data, at) {
  return places(data).reduce((best, x) =>
    Math.abs(share(data, x) - at) < Math.abs(share(data, best) - at) ? x : best,
  );
}

/** The values at one x, in words. */
function words(data, x) {
  const found = data.lines.map(({ name, points }) => [name, points.find((point) => point[0] === x)?.[1]]);
  const text = found.filter(([, y]) => y !== undefined).map(([name, y]) => `${name} ${amount(y)}`);
  return `${data.kind === "ago" ? ago(-x) : `step ${x}`}: ${text.join(", ")}`;
}

function show(chart, at) {
  const data = JSON.parse(chart.dataset.chart);
  const x = nearest(data, at);
  const box = chart.querySelector(".lines").getBoundingClientRect();
  const left = box.left + box.width * share(data, x);
  hair.hidden = values.hidden = false;
  Object.assign(hair.style, { left: `${left}px`, top: `${box.top}px`, height: `${box.height}px` });
  values.textContent = words(data, x);
  const width = values.offsetWidth;
  const beside = Math.min(Math.max(4, left - width / 2), document.documentElement.clientWidth - width - 4);
  Object.assign(values.style, { left: `${beside}px`, top: `${Math.max(4, box.top - values.offsetHeight - 6)}px` });
  shown = { chart, at: share(data, x), top: box.top };
}

function hide() {
  hair.hidden = values.hidden = true;
  shown = null;
}

function pointed(event) {
  const chart = event.target.closest?.(".chart");
  if (!chart) return;
  const box = chart.querySelector(".lines").getBoundingClientRect();
  show(chart, (event.clientX - box.left) / box.width);
}

document.addEventListener("pointerdown", (event) => (event.target.closest?.(".chart") ? pointed(event) : hide()));
document.addEventListener("pointermove", (event) => {
  if (event.target.closest?.(".chart")) pointed(event);
  else if (shown && shown.chart !== document.activeElement) hide();
});
document.addEventListener("keydown", (event) => {
  const chart = event.target.closest?.(".chart");
  if (!chart) return;
  const data = JSON.parse(chart.dataset.chart);
  const all = places(data);
  const now = shown?.chart === chart ? all.indexOf(nearest(data, shown.at)) : all.length;
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Escape") hide();
  if (next === undefined) return;
  event.preventDefault();
  const x = all[Math.min(all.length - 1, Math.max(0, next))];
  show(chart, share(data, x));
  say(words(data, x));
});
document.addEventListener("focusout", (event) => event.target.closest?.(".chart") && hide());
// The event of a scroll comes a frame later, when values may be shown at the new place already.
const hasMoved = ({ chart, top }) => chart.querySelector(".lines").getBoundingClientRect().top !== top;
addEventListener("scroll", () => shown && hasMoved(shown) && hide(), { passive: true });
// The chart may have moved, or changed, or be gone.
document.addEventListener("refreshed", () => shown && (shown.chart.isConnected ? show(shown.chart, shown.at) : hide()));
