// What an engine's snapshot says of the pool: the colours of adapters, the map's layers and the legend's entries.
/** The first colours differ most; the others are used when those are taken. */
const COLOURS = 14;
const FIRST_COLOURS = 8;

/** @type {Map<string, number>} */
const given = new Map();

/** Give colours to adapters that have none yet; two that are shown at once differ, as long as there are colours. */
export function giveColours(digests) {
  const taken = new Set(digests.filter((digest) => given.has(digest)).map((digest) => given.get(digest)));
  for (const digest of digests.filter((one) => !given.has(one)).sort()) {
    const wanted = parseInt(digest.slice(-6), 16) % FIRST_COLOURS;
    const order = Array.from({ length: COLOURS }, (_, at) => (at < FIRST_COLOURS ? (wanted + at) % FIRST_COLOURS : at));
    const colour = order.find((one) => !taken.has(one)) ?? wanted;
    given.set(digest, colour);
    taken.add(colour);
  }
}

/** The class that gives an adapter's weights their colour. */
export const adapterColour = (digest) => (given.has(digest) ? `a${given.get(digest)}` : "a-any");

/** What an adapter is called: its first name and how many more it has, or its digest. */
export function nameOf(digest, names) {
  if (!names?.length) return digest ? digest.slice("sha256:".length, "sha256:".length + 12) : "an adapter";
  return names.length > 1 ? `${names[0]} and ${names.length - 1} more` : names[0];
}

/** In the order of the legend; `label` says what such pages hold. */
export const KINDS = {
  kv: { label: "KV cache", colour: "s0", title: "KV of running requests, in pages that are not full yet" },
  prefix: { label: "Prefix cache", colour: "s6", title: "full pages of KV, in use or kept for prompts with the same beginning" },
  adapter: { label: "Adapters", colour: "s1", title: "weights" },
  quarantine: { label: "Just freed", colour: "s3", title: "free again when the running step ends" },
  free: { label: "Free", colour: "s-free", title: "not used" },
};
const NAMED_ADAPTERS = 12;

/** The residents that have a slot, by it. */
export const bySlot = (snapshot) => new Map(snapshot.residents.filter((one) => one.slot >= 0).map((one) => [one.slot, one]));

/** What each cell of a map is used for, as places in `map.uses`. @param {{runs: [number, number][]}} map Lengths and uses. */
export const cellsOf = (map) => map.runs.flatMap(([length, use]) => new Array(length).fill(use));

/** Cells of a map, and how many there are up to the last that is in use. */
export function extentOf(map) {
  const cells = cellsOf(map);
  return { all: cells.length, used: cells.findLastIndex((use) => map.uses[use].kind !== "free") + 1 };
}

/**
 * The map's cells as rectangles, one path for each use.
 * @param {{uses: {kind: string, owner: number}[], runs: [number, number][]}} map
 * @param {number} columns @param {number} pitch Size of a cell with the gap to the next one, in pixels.
 * @param {number} most Cells to draw.
 * @returns {{kind: string, owner: number, cells: number, d: string}[]}
 */
export function layersOf(map, columns, pitch, most) {
  const layers = map.uses.map((use) => ({ ...use, cells: 0, d: "" }));
  let at = 0;
  for (const [length, use] of map.runs) {
    const layer = layers[use];
    layer.cells += length;
    const end = Math.min(at + length, most);
    for (let from = at, width; from < end; from += width) {
      const column = from % columns;
      width = Math.min(end - from, columns - column); // a run goes on in the next row
      layer.d += `M${column * pitch} ${Math.floor(from / columns) * pitch}h${width * pitch}v${pitch}h${-width * pitch}z`;
    }
    at += length;
  }
  return layers;
}

/**
 * The legend: pages by kind, adapters one by one; they sum to the pool.
 * @returns {{key: string, kind: string, label: string, pages: number, digests: string[], title: string}[]}
 */
export function entriesOf(snapshot) {
  const { pages } = snapshot;
  const kind = (key) => ({ key, kind: key, label: KINDS[key].label, title: KINDS[key].title, pages: pages[key] ?? 0, digests: [] });
  const held = snapshot.residents.filter((one) => one.tier === "device" && one.pages > 0).sort((a, b) => b.pages - a.pages || (a.digest < b.digest ? -1 : 1));
  const named = held.slice(0, NAMED_ADAPTERS).map((one) => entry([one], one.digest, nameOf(one.digest, one.adapters)));
  const rest = held.slice(NAMED_ADAPTERS);
  const others = entry(rest, "others", `${rest.length} more adapters`);
  const loading = entry(snapshot.residents.filter((one) => one.tier === "loading"), "coming", "Adapters being loaded");
  const taken = (pages.adapter ?? 0) - held.reduce((sum, one) => sum + one.pages, 0);
  const adapters = [...named, others, { ...loading, title: "pages already taken", pages: taken }].filter((one) => one.pages > 0);
  return [...adapters, kind("kv"), kind("prefix"), kind("quarantine"), kind("free")];
}

function entry(residents, key, label) {
  const pages = residents.reduce((sum, one) => sum + one.pages, 0);
  return { key, kind: "adapter", label, title: "weights; its KV cache is highlighted too", pages, digests: residents.map((one) => one.digest) };
}

/** Whether an entry of the legend stands for a use of cells. @param {object|undefined} resident The adapter in the slot of the cells. */
export const isMeant = (entry, use, resident) =>
  entry.kind === "adapter" ? resident !== undefined && entry.digests.includes(resident.digest) : entry.kind === use.kind;
