// What the pool's pages are used for, out of a snapshot: the map's layers and the legend's entries.
import { nameOf } from "./colours.js";

/** In the order of the legend; `label` says what such pages hold. */
export const KINDS = {
  kv: { label: "KV cache", title: "KV of running requests, in pages that are not full yet" },
  prefix: { label: "Prefix cache", title: "full pages of KV, in use or kept for prompts with the same beginning" },
  adapter: { label: "Adapters", title: "weights" },
  quarantine: { label: "Just freed", title: "free again when the running step ends" },
  free: { label: "Free", title: "not used" },
};
const NAMED_ADAPTERS = 12;

/** The residents that have a slot, by it. */
export const bySlot = (snapshot) => new Map(snapshot.residents.filter((one) => one.slot >= 0).map((one) => [one.slot, one]));

/**
 * The map's cells as rectangles, one path for each use.
 * @param {{pages_per_cell: number, uses: {kind: string, owner: number}[], runs: [number, number][]}} map
 * @param {number} columns @param {number} pitch Size of a cell with the gap to the next one, in pixels.
 * @param {number} most Cells to draw.
 * @returns {{kind: string, owner: number, cells: number, d: string}[]}
 */
export function layersOf(map, columns, pitch, most) {
  const parts = map.uses.map(() => []);
  const cells = map.uses.map(() => 0);
  let at = 0;
  for (const [length, use] of map.runs) {
    cells[use] += length;
    const end = Math.min(at + length, most);
    for (let from = at; from < end; ) {
      const row = Math.floor(from / columns);
      const column = from % columns;
      // Whole rows are drawn as one rectangle, what is left of a row as another.
      const rows = column === 0 ? Math.floor((end - from) / columns) : 0;
      const width = rows ? columns : Math.min(end - from, columns - column);
      const height = Math.max(1, rows);
      parts[use].push(`M${column * pitch} ${row * pitch}h${width * pitch}v${height * pitch}h${-width * pitch}z`);
      from += width * height;
    }
    at += length;
  }
  return map.uses.map((use, index) => ({ ...use, cells: cells[index], d: parts[index].join("") }));
}

/** Cells of a map, and how many there are up to the last that is in use. */
export function extentOf(map) {
  let all = 0;
  let used = 0;
  for (const [length, use] of map.runs) {
    all += length;
    if (map.uses[use].kind !== "free") used = all;
  }
  return { all, used };
}

/** What a cell is used for. */
export function useAt(map, cell) {
  let end = 0;
  for (const [length, use] of map.runs) {
    end += length;
    if (cell < end) return map.uses[use];
  }
  return null;
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
  const others = rest.length ? [entry(rest, "others", `${rest.length} more adapters`)] : [];
  const known = held.reduce((sum, one) => sum + one.pages, 0);
  const coming = (pages.adapter ?? 0) - known;
  const onTheWay = coming > 0 ? [{ key: "coming", kind: "adapter", label: "Adapters being loaded", title: "pages already taken", pages: coming, digests: snapshot.residents.filter((one) => one.tier === "loading").map((one) => one.digest) }] : [];
  return [...named, ...others, ...onTheWay, kind("kv"), kind("prefix"), kind("quarantine"), kind("free")];
}

const entry = (residents, key, label) => ({
  key,
  kind: "adapter",
  label,
  title: "weights; its KV cache is highlighted too",
  pages: residents.reduce((sum, one) => sum + one.pages, 0),
  digests: residents.map((one) => one.digest),
});

/** Whether an entry of the legend means what a cell is used for. @param {object|undefined} resident Whose the cell is. */
export const isMeant = (entry, use, resident) =>
  entry.kind === "adapter" ? resident !== undefined && entry.digests.includes(resident.digest) : entry.kind === use.kind;
