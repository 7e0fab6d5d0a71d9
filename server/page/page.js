// The page's clock: asks the daemon one thing a second, in turn, and hands what it hears to those who show it. Nothing
// is asked while the tab is hidden.

import { call, useKey } from "./api.js";
import { showCache } from "./cache.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { showLife, showRequests } from "./requests.js";
import { addSteps, forgetSteps, KEPT, lastStep } from "./steps.js";
import { showMetrics } from "./tiles.js";

const TICK_MS = 1000;
const TURNS = ["metrics", "steps", "cache", "life", "steps", "requests"];
const AT_FIRST = ["models", "info"]; // and again after a failure: the daemon may be another one

const main = document.querySelector("main");
let first = [...AT_FIRST];
let turn = 0;
let model = "";
let life = { id: null, over: true }; // of the chosen request

const get = (path) => call(path, { signal: AbortSignal.timeout(10_000) });
const json = async (path) => (await get(path)).json();

const reads = {
  async models() {
    model = (await json("v1/models")).data[0].id;
    document.title = `${model} – Octavo`;
    forgetSteps();
    show("live", "live");
  },
  async info() {
    const { model, device, max_model_len: context, reasons } = (await json("info")).plan;
    byId("facts").textContent = `${model}, ${reasons.model} · ${device} · context ${context}`;
  },
  metrics: async () => showMetrics(await (await get("metrics")).text()) || forgetSteps(), // of another process
  steps: async () => addSteps((await json(`debug/steps?limit=${KEPT}&after=${lastStep()}`)).steps),
  cache: async () => showCache(await json("debug/cache?limit=100&cells=2048")),
  requests: async () => showRequests((await json("debug/requests?limit=50")).requests),
  async life() {
    const asked = life;
    if (asked.over) return reads.metrics(); // there is nothing to follow
    const news = await json(`debug/requests/${encodeURIComponent(asked.id)}`).catch((error) => {
      if (error.status !== 404) throw error;
      return null;
    });
    asked.over = news === null || news.finished_after_seconds !== null;
    if (asked === life) showLife(asked.id, news);
  },
};

function show(state, text) {
  if (state === "locked") model = "";
  byId("status").className = state;
  byId("status").textContent = text;
  byId("locked").hidden = state !== "locked";
  main.hidden = !model;
  main.classList.toggle("stale", state === "down");
}

async function read(name) {
  const panels = document.querySelectorAll(`[data-of="${name === "life" ? "requests" : name}"]`);
  try {
    await reads[name]();
    for (const panel of panels) delete panel.dataset.denied;
  } catch (error) {
    if (error.status === 401 && panels.length) {
      for (const panel of panels) panel.dataset.denied = error.message; // it needs an admin's key
      return;
    }
    first = [...AT_FIRST];
    if (error.status === 401) show("locked", "an API key is needed");
    else show("down", error.message);
    if (error.status === undefined) console.error(error); // a mistake of this page
  }
}

async function tick() {
  if (!document.hidden && byId("locked").hidden) await read(first.shift() ?? TURNS[turn++ % TURNS.length]);
  setTimeout(tick, TICK_MS);
}

document.addEventListener("choose", ({ detail: id }) => {
  life = { id, over: false };
  read("life");
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  first = [...AT_FIRST];
  show("connecting", "connecting");
});
startChat(() => model);
tick();
