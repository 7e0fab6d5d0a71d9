// The page pool as a map, and the prefix tree.

import { byId, choose, colourOf, drawn, keyed, make, requestButton } from "./dom.js";

// How /debug/cache numbers the cells of its map; from OWNER on, places in its list of owners.
const FREE = 0, CACHED = 1, PINNED = 3, OWNER = 4;

const canvas = byId("pool");
const draw = drawn(canvas, paint);
let view = null;

export function showCache(news) {
  view = news;
  draw();
  const { pages, map, owners, pinned_tokens: pins, tree } = view;
  const pinned = `pinned prefixes ${pins.length}`;
  const key = { free: `free ${pages.free}`, cached: `cached ${pages.evictable}`, shared: "shared", pinned };
  byId("pool-key").replaceChildren(
    `${pages.used} of ${pages.total} held, ${map.pages_per_cell} in a cell, ${view.page_size} tokens in each`,
    ...Object.entries(key).flatMap(([className, text]) => [make("i", { className }), text]),
  );
  canvas.ariaLabel = `${pages.total} pages: ${pages.used} held, ${pages.evictable} cached, ${pages.free} free`;
  keyed(byId("owners"), owners, (owner) => `${owner.request} ${owner.choice}`,
    (owner) => make("li", {}, requestButton(owner.request), ""),
    (item, owner) => (item.lastChild.data = ` ${owner.pages} pages`));
  byId("tree-size").textContent = `${pages.nodes} nodes, the ${tree.length} used last · ${pages.evicted_pages} pages evicted`;
  showTree(tree);
}

// Squares as large as fit.
function layout(width, height) {
  const count = view.map.cells.length;
  let size = Math.floor(Math.min(22, Math.sqrt((width * height) / count)));
  while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < count) size -= 1;
  return { size, columns: Math.floor(width / size) };
}

function paint(context, width, height) {
  if (!view) return;
  const { size, columns } = layout(width, height);
  const ink = context.fillStyle;
  view.map.cells.forEach((what, place) => {
    context.globalAlpha = what === FREE ? 0.1 : what === CACHED ? 0.32 : 1;
    context.fillStyle = what >= OWNER ? colourOf(view.owners[what - OWNER].request) : what === PINNED ? "#ffb224" : ink;
    const side = size > 3 ? size - 1 : size;
    context.fillRect((place % columns) * size, Math.floor(place / columns) * size, side, side);
  });
}

canvas.addEventListener("click", (event) => {
  const { size, columns } = layout(canvas.clientWidth, canvas.clientHeight);
  const what = view.map.cells[Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size)];
  if (what >= OWNER) choose(view.owners[what - OWNER].request);
});

// A node keeps its element, and so whether it is open, while its place in the tree and its first tokens stay.
function showTree(tree) {
  const children = Map.groupBy(tree.map((node, number) => ({ ...node, number })), (node) => node.parent);
  const longest = Math.max(1, ...tree.map((node) => node.pages[0]));
  const fill = (list, parent) => keyed(list, children.get(parent) ?? [],
    (node) => `${node.namespace} ${node.positions[0]} ${node.first_tokens}`,
    () => make("li", {}, make("details", { open: true }, make("summary", {}, "", make("i")), make("ul"))),
    (item, node) => {
      const [summary, list] = item.firstChild.children;
      const [start, end] = node.positions;
      summary.firstChild.data = `${start}–${end} · tokens ${end - start}, pages ${node.pages[0]}`
        + (node.locks ? ` · in use by ${node.locks}` : "") + (node.namespace ? ` · ${node.namespace}` : "");
      summary.title = `begins with the tokens ${node.first_tokens.join(", ")}`;
      summary.lastChild.style.width = `${(100 * node.pages[0]) / longest}px`;
      fill(list, node.number);
    });
  fill(byId("tree"), null);
}
