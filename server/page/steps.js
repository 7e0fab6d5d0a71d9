// The running batch as a timeline: a column for each step, prompt rows above, decode and drafted rows below, and under
// them how long the step took.

import { byId, colourOf, drawn, keyed, make, requestButton } from "./dom.js";

const COLUMN = 7;
const BAD = "#e5484d";
export const KEPT = 300; // steps; more than the widest page shows

const canvas = byId("steps");
const draw = drawn(canvas, paint);
let steps = [];
let picked = null; // a step's number; null follows the latest

export function addSteps(news) {
  steps = [...steps, ...news.map((step) => ({ ...step, parts: partsOf(step) }))].slice(-KEPT);
  draw();
}

export function forgetSteps() {
  steps = [];
  picked = null;
}

export const lastStep = () => steps.at(-1)?.number ?? 0;

// Rows of each sequence by kind. One row of a request that was just admitted is the last of a prompt that was cached.
function partsOf(step) {
  const drafted = new Map(step.draft_rows.map(([id, choice, rows]) => [`${id} ${choice}`, rows]));
  return step.sequences.map(([id, choice, rows]) => {
    const prompt = rows > 1 || step.admitted.includes(id) ? rows : 0;
    return { id, prompt, decode: rows - prompt, drafted: drafted.get(`${id} ${choice}`) ?? 0 };
  });
}

const rowsOf = (step, kinds) => step.parts.reduce((sum, part) => sum + kinds.reduce((rows, kind) => rows + part[kind], 0), 0);
const secondsOf = (step) => step.plan_seconds + step.run_seconds + step.apply_seconds;
const visible = () => steps.slice(-Math.floor(canvas.clientWidth / COLUMN));

function paint(context, width, height) {
  const ink = context.fillStyle;
  const shown = visible();
  const fill = (colour, alpha, x, y, size, w = COLUMN - 1) => {
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    context.fillRect(x, y, w, size);
  };
  const lanes = [
    ["prompt rows", ["prompt"], 14, height * 0.46],
    ["decode rows", ["decode", "drafted"], height * 0.46 + 16, height * 0.82],
  ];
  const most = lanes.map(([, kinds]) => Math.max(1, ...shown.map((step) => rowsOf(step, kinds))));
  const slowest = Math.max(1e-6, ...shown.map(secondsOf));
  shown.forEach((step, column) => {
    const x = width - (shown.length - column) * COLUMN;
    if (step.number === picked) fill(ink, 0.15, x, 0, height);
    lanes.forEach(([, kinds, top, bottom], lane) => {
      let y = bottom;
      for (const part of step.parts)
        for (const kind of kinds) {
          const size = (part[kind] / most[lane]) * (bottom - top);
          y -= size;
          fill(colourOf(part.id), kind === "drafted" ? 0.45 : 1, x, y, size > 3 ? size - 1 : size);
        }
    });
    if (step.error || step.preempted.length) fill(BAD, 1, x, 0, step.error ? height : 6);
    const size = (secondsOf(step) / slowest) * (height * 0.18 - 18);
    fill(ink, 0.4, x, height - size, size);
  });
  fill(ink, 0.7, 0, 0, 0);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  lanes.forEach(([name, , top], lane) => context.fillText(`${name}, up to ${most[lane]}`, 2, top - 3));
  context.fillText(`time, up to ${(slowest * 1e3).toFixed(1)} ms`, 2, height * 0.82 + 13);
  canvas.ariaLabel = `The last ${shown.length} steps. Arrow keys choose one, Escape follows the latest.`;
  if (shown.length) describe(shown.find((step) => step.number === picked) ?? shown.at(-1));
}

function describe(step) {
  const ms = (seconds) => (seconds * 1e3).toFixed(1);
  const why = Object.entries(step.waiting_reasons).map(([reason, count]) => ` (${count} for ${reason})`).join("");
  const rows = ["prompt", "decode", "drafted"].map((kind) => `${rowsOf(step, [kind])} ${kind}`).join(" + ");
  byId("step").ariaLive = picked === null ? "off" : "polite";
  byId("step").textContent = `Step ${step.number} · ${ms(secondsOf(step))} ms: plan ${ms(step.plan_seconds)}, run `
    + `${ms(step.run_seconds)}, apply ${ms(step.apply_seconds)} · rows: ${rows} · ${step.running} running, ${step.waiting} `
    + `waiting${why} · pages: ${step.pages_used} held, ${step.pages_evictable} cached, ${step.pages_free} free`
    + (step.preempted.length ? ` · ${step.preempted.length} preempted` : "") + (step.error ? ` · ${step.error}` : "");
  const requests = [...new Set(step.parts.map((part) => part.id))].slice(0, 64);
  keyed(byId("step-requests"), requests, (id) => id, (id) => make("li", {}, requestButton(id)));
}

function pick(place) {
  const shown = visible();
  picked = shown[Math.min(Math.max(place, 0), shown.length - 1)]?.number ?? null;
  draw();
}

canvas.addEventListener("click", (event) => pick(visible().length - Math.ceil((canvas.clientWidth - event.offsetX) / COLUMN)));
canvas.addEventListener("keydown", (event) => {
  const shown = visible();
  const at = picked === null ? shown.length - 1 : shown.findIndex((step) => step.number === picked);
  const places = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: shown.length - 1, Escape: null };
  if (!(event.key in places)) return;
  event.preventDefault();
  pick(places[event.key] ?? NaN);
});
