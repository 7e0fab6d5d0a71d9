// Throughput and latency, computed from what Prometheus would scrape.

import { byId, drawn, make } from "./dom.js";

const WINDOW_SECONDS = 60; // of latencies and shares
const RATE_SECONDS = 7; // of rates: at least two scrapes
const POINTS = 60;

let scrapes = []; // of the window, oldest first

// A map with the time, and sums by name and by name and what it is told apart by: "octavo_kv_pages", "octavo_kv_pages used".
function parse(text) {
  const sums = new Map([["time", performance.now() / 1e3]]);
  const add = (key, number) => sums.set(key, (sums.get(key) ?? 0) + number);
  for (const line of text.split("\n")) {
    const [, name, labels, number] = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    const [, label] = /\b(?:le|state|outcome)="([^"]*)"/.exec(labels) ?? [];
    if (name) add(name, Number(number));
    if (label) add(`${name} ${label}`, Number(number));
  }
  return sums;
}

// All of these take { old, last, now }: the scrapes of a minute ago, of some seconds ago and of now.
const gauge = (name) => ({ now }) => now.get(`octavo_${name}`) ?? 0;
const added = (name, since = "old") => (all) => gauge(name)(all) - gauge(name)({ now: all[since] });
const rate = (name, since = "last") => (all) => added(name, since)(all) / (all.now.get("time") - all[since].get("time"));
const share = (part, whole) => (all) => (whole(all) ? part(all) / whole(all) : null);
// Linear inside a bucket; null when there was nothing.
const quantile = (name, wanted) => (all) => {
  const key = `octavo_${name}_bucket `;
  const limits = [...all.now.keys()].filter((one) => one.startsWith(key)).map((one) => one.slice(key.length));
  const counts = limits.map((limit) => added(`${name}_bucket ${limit}`)(all));
  const rank = wanted * (counts.at(-1) ?? 0);
  const place = counts.findIndex((count) => count >= rank);
  if (!rank) return null;
  const [low, high] = [Number(limits[place - 1] ?? 0), Number(limits[place].replace("+Inf", limits[place - 1]))];
  return low + ((high - low) * (rank - (counts[place - 1] ?? 0))) / (counts[place] - (counts[place - 1] ?? 0));
};

const known = (write) => (value) => (value === null ? "–" : write(value));
const number = known((value) =>
  value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : value.toFixed(value < 10 && value % 1 ? 1 : 0));
const time = known((value) => (value < 1 ? `${number(value * 1e3)} ms` : `${value.toFixed(2)} s`));
const percent = known((value) => `${number(100 * value)}%`);
const pages = (state) => share(gauge(`kv_pages ${state}`), gauge("kv_pages"));
const [FIRST, EACH] = ["time_to_first_token_seconds", "time_per_output_token_seconds"];

// A name, the number and how it is written, and the line below.
const tiles = [
  ["Tokens / s", rate("generated_tokens_total"), number, (all) => `prompts ${number(rate("prompt_tokens_total")(all))}`],
  ["First token", quantile(FIRST, 0.5), time, (all) => `p95 ${time(quantile(FIRST, 0.95)(all))}`],
  ["Per token", quantile(EACH, 0.5), time, (all) => `p95 ${time(quantile(EACH, 0.95)(all))}`],
  ["Running", gauge("requests_running"), number, () => ""],
  ["Waiting", gauge("requests_waiting"), number, (all) => `preemptions ${number(added("preemptions_total")(all))}`],
  ["Pages held", pages("used"), percent, (all) => `cached ${percent(pages("evictable")(all))}`],
  ["Found in cache", share(added("prefix_hit_tokens_total"), added("prefix_query_tokens_total")), percent,
    () => "of prompt tokens"],
  ["Requests / min", (all) => 60 * rate("requests_total", "old")(all), number,
    (all) => `failed ${number(added("requests_total error")(all))}, refused ${number(added("requests_total refused")(all))}`],
].map(([name, value, write, below]) => {
  const [big, small, canvas] = [make("b", {}, "–"), make("small"), make("canvas", { ariaHidden: "true" })];
  const tile = { value, write, below, big, small, points: [] };
  byId("tiles").append(make("div", { className: "tile" }, name, big, small, canvas));
  tile.draw = drawn(canvas, (context, width, height) => {
    const most = Math.max(1e-9, ...tile.points);
    context.lineWidth = 1.5;
    context.beginPath();
    tile.points.forEach((point, place) => {
      if (point !== null) context.lineTo((width * place) / (POINTS - 1), height - 1.5 - (point / most) * (height - 4));
    });
    context.stroke();
  });
  return tile;
});

// Returns whether the figures come from the same process as those before.
export function showMetrics(text) {
  const now = parse(text);
  const same = !scrapes.length || scrapes[0].get("process_start_time_seconds") === now.get("process_start_time_seconds");
  scrapes = [...scrapes.filter((one) => same && now.get("time") - one.get("time") <= WINDOW_SECONDS), now];
  if (scrapes.length < 2) return same;
  const [old] = scrapes;
  const all = { now, old, last: scrapes.findLast((one) => now.get("time") - one.get("time") >= RATE_SECONDS) ?? old };
  for (const tile of tiles) {
    tile.points = [...tile.points, tile.value(all)].slice(-POINTS);
    tile.big.textContent = tile.write(tile.points.at(-1));
    tile.small.textContent = tile.below(all);
    tile.draw();
  }
  return same;
}
