// Elements made of text only, lists that keep their elements, canvases of the right size, and a colour per request.

export const byId = (id) => document.getElementById(id);

// An element with properties and children; strings become text and nothing else.
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Make the children of `parent` those of `items`, in order. Those that stay are the same elements as before, so that
// focus and what is open outlive an update.
export function keyed(parent, items, keyOf, create, update = () => {}) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = String(keyOf(item));
    const node = there.get(key) ?? create(item);
    there.delete(key);
    node.dataset.key = key;
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
    update(node, item);
  });
  there.forEach((left) => left.remove());
}

const hues = new Map();
let hue = 60;

// Neighbours in time are far apart in hue: each next one is a golden angle further.
export function colourOf(request) {
  if (!hues.has(request)) hues.set(request, (hue = (hue + 137.5) % 360));
  if (hues.size > 2000) hues.delete(hues.keys().next().value);
  return `hsl(${hues.get(request)} 62% 55%)`;
}

let chosen = null;

// Choosing a request anywhere chooses it everywhere.
export function choose(request) {
  chosen = request;
  for (const button of document.querySelectorAll(".request")) button.classList.toggle("chosen", button.title === chosen);
  document.dispatchEvent(new CustomEvent("choose", { detail: request }));
}

export function requestButton(id) {
  const button = make("button", { type: "button", className: "request", title: id }, `…${id.slice(-8)}`);
  button.classList.toggle("chosen", id === chosen);
  button.style.borderLeftColor = colourOf(id);
  button.addEventListener("click", () => choose(id));
  return button;
}

// Draw with a context in CSS pixels whose ink is the canvas' own colour: now, and whenever size or scheme change.
// Returns the function that draws again.
export function drawn(canvas, draw) {
  const again = () => {
    const { clientWidth: width, clientHeight: height } = canvas;
    const scale = window.devicePixelRatio;
    Object.assign(canvas, { width: width * scale, height: height * scale });
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = context.strokeStyle = getComputedStyle(canvas).color;
    if (width) draw(context, width, height);
  };
  new ResizeObserver(again).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  return again;
}
