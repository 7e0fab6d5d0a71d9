// A conversation with the model, streamed from /v1/chat/completions.

import { call } from "./api.js";
import { byId, choose, make } from "./dom.js";

const TURNS = 40; // of the conversation that are sent again

const talk = byId("talk");
let turns = [];
let stopping = null; // the AbortController of the answer that is being written

function bubble(className, text) {
  const node = make("div", { className }, text);
  talk.append(node);
  talk.scrollTop = talk.scrollHeight;
  return node;
}

// The events of a stream; throws the error that ends one.
async function* eventsOf(response) {
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part; !(part = await reader.read()).done; ) {
    const blocks = (text + part.value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: {")) continue; // a comment, or the end
      const event = JSON.parse(block.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function answer(model) {
  const node = bubble("assistant", "");
  const text = node.appendChild(document.createTextNode(""));
  const note = node.appendChild(make("small", {}, "…"));
  const began = performance.now();
  let first = null, tokens = 0;
  const body = JSON.stringify({
    model, messages: turns.slice(-TURNS), stream: true, stream_options: { include_usage: true },
    max_tokens: byId("max-tokens").valueAsNumber, temperature: byId("temperature").valueAsNumber,
  });
  const headers = { "content-type": "application/json" };
  try {
    const response = await call("v1/chat/completions", { method: "POST", body, headers, signal: stopping.signal });
    for await (const event of eventsOf(response)) {
      if (first === null) choose(event.id);
      first ??= performance.now();
      tokens = event.usage?.completion_tokens ?? tokens;
      text.data += event.choices[0]?.delta.content ?? "";
      talk.scrollTop = talk.scrollHeight;
    }
    const each = (performance.now() - first) / Math.max(1, tokens - 1);
    note.textContent = `\n${tokens} tokens, ${(first - began).toFixed(0)} ms to the first, then ${each.toFixed(1)} ms each`;
  } catch (error) {
    note.textContent = "\nstopped";
    if (error.name !== "AbortError") bubble("error", error.message);
  }
  if (text.data) turns.push({ role: "assistant", content: text.data });
  else turns.pop(); // what got no answer is not said again
}

// `modelName` gives the name of the model that is served now.
export function startChat(modelName) {
  byId("chat").addEventListener("submit", async (event) => {
    event.preventDefault();
    const content = byId("say").value;
    if (stopping || !content.trim()) return;
    byId("say").value = "";
    turns.push({ role: "user", content });
    bubble("user", content);
    stopping = new AbortController();
    byId("stop").disabled = false;
    await answer(modelName());
    stopping = null;
    byId("stop").disabled = true;
  });
  byId("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("chat").requestSubmit();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("forget").addEventListener("click", () => {
    stopping?.abort();
    turns = [];
    talk.replaceChildren();
  });
}
