// The requests of now and of a while ago, and the life of the chosen one as a strip.

import { byId, keyed, make, requestButton } from "./dom.js";

const CHOICES = 8; // strips of one request
// What an event begins, for the choice it happened to; the others only have a line.
const BEGINS = { queued: "waiting", admitted: "prompt", forked: "answer", "first token": "answer", preempted: "preempted" };

const time = (seconds) => (seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(2)} s`);

function stateOf(life) {
  if (life.finished_after_seconds !== null) return life.error ? "failed" : life.finish_reasons[0] ?? "ended";
  if (life.first_token_after_seconds !== null) return "answering";
  return life.admitted_after_seconds === null ? "waiting" : "prompt";
}

export function showRequests(lives) {
  keyed(byId("requests"), lives, (life) => life.id,
    (life) => make("tr", {}, make("td", {}, requestButton(life.id)), ...Array.from({ length: 5 }, () => make("td"))),
    (row, life) => {
      const { prompt_tokens: prompt, cached_tokens: cached, output_tokens: answer, first_token_after_seconds: first } = life;
      const values = [stateOf(life), prompt, cached, answer || "", first === null ? "" : time(first)];
      values.forEach((value, place) => (row.children[place + 1].textContent = value));
    });
}

function strip(events, end) {
  const spans = [];
  let running = "prompt";
  for (const { kind, after_seconds: at } of events) {
    if (BEGINS[kind] === "answer") running = "answer";
    const begins = kind === "resumed" ? running : BEGINS[kind];
    if ((begins || kind === "finished") && spans.length) spans.at(-1).until ??= at;
    if (begins) spans.push({ begins, from: at });
  }
  return make("div", { className: "strip" }, ...spans.map(({ begins, from, until = end }) => {
    const node = make("div", { className: begins, title: `${begins} for ${time(until - from)}, from ${time(from)} on` });
    node.style.left = `${(100 * from) / end}%`;
    node.style.width = `${(100 * (until - from)) / end}%`;
    return node;
  }));
}

// `life` as /debug/requests/{id} has it, or null when the daemon has forgotten it.
export function showLife(id, life) {
  byId("life").hidden = false;
  const [title, facts] = byId("life").children;
  title.textContent = id;
  const { events = [], n = 1, dropped_events: dropped, error } = life ?? {};
  const end = Math.max(1e-6, life?.finished_after_seconds ?? life?.age_seconds ?? 0);
  facts.textContent = life === null ? "forgotten: only the last requests are remembered" : [
    stateOf(life), `${time(end)} in all`, `prompt ${life.prompt_tokens}, cached ${life.cached_tokens}`,
    `answer ${life.output_tokens}`,
    n > 1 && `${n} choices`, life.preemptions && `preempted ${life.preemptions} times`,
    life.drafted_tokens && `drafted ${life.drafted_tokens}, accepted ${life.accepted_tokens}`, error,
  ].filter(Boolean).join(" · ");
  const strips = Array.from({ length: Math.min(n, CHOICES) }, (_, choice) =>
    strip(events.filter((event) => event.choice === choice), end));
  byId("strips").replaceChildren(...strips);
  byId("events").replaceChildren(...events.map(({ after_seconds: at, kind, choice, ...detail }, place) => {
    const texts = Object.entries(n > 1 ? { choice, ...detail } : detail).map(([name, value]) => `${name} ${value}`);
    if (dropped && place === 8) texts.push(`(after ${dropped} events that are not kept)`);
    return make("li", {}, ...[`+${at.toFixed(4)} s`, kind, texts.join(", ")].map((text) => make("span", {}, text)));
  }));
}
