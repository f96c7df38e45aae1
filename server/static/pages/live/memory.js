// The memory pool: which pages hold adapters, which KV cache, and which are free.
import { html, useEffect, useId, useRef, useState } from "../../lib.js";
import { compact, count, percent } from "../../format.js";
import { param, setParams } from "../../place.js";
import { Card, Segmented, Table, numbers, useWidth } from "../../ui.js";
import { Grid, niceTicks } from "../../charts.js";
import { KEPT_MS } from "./feed.js";
import { KINDS, adapterColour, bySlot, cellsOf, entriesOf, extentOf, isMeant, layersOf, nameOf } from "./pool.js";

const HEIGHT = 336;
const MIN_PITCH = 5;
const MAX_PITCH = 15;
const FEWEST_CELLS = 256;

export function Memory({ snapshot, feed }) {
  const [hovered, setHovered] = useState(null);
  const highest = useRef({ boot: null, cells: 0 });
  const entries = entriesOf(snapshot);
  const all = snapshot.ready.memory.num_pages;
  const { page_bytes: pageBytes, page_tokens: pageTokens } = snapshot.ready.geometry;
  const { pages_per_cell: perCell } = snapshot.page_map;
  const extent = extentOf(snapshot.page_map);
  const reach = reachOf(highest, snapshot.boot_id, extent);
  const view = param("map") === "whole" || reach === extent.all ? "whole" : "used";
  const shownCells = view === "whole" ? extent.all : reach;
  const lit = entries.find((one) => one.key === (hovered ?? param("show")));
  const left = all - Math.min(all, shownCells * perCell);
  return html`<${Card} title="One memory" note=${`${count(all)} pages of ${pageBytes / 1024} KiB, used as needed for adapters and KV cache of ${pageTokens} tokens each`}
    actions=${reach < extent.all && html`<${Segmented} label="How much of the pool" value=${view} onChange=${(value) => setParams({ map: value === "used" ? null : value })}
      options=${[["used", "Part in use"], ["whole", "Whole pool"]]} />`}>
    <div class="memory">
      <div class="memory-map">
        <${Cells} snapshot=${snapshot} cells=${shownCells} lit=${lit} onPoint=${setHovered} entries=${entries} />
        <p class="quiet small-print">${perCell > 1 ? `A cell stands for ${perCell} pages and shows what most of them hold. ` : "A cell stands for one page. "}${left > 0 && html`${count(left)} more pages are free and not shown.`}</p>
        <${History} feed=${feed} of=${all} />
      </div>
      <${MapLegend} entries=${entries} all=${all} lit=${lit} onHover=${setHovered} />
    </div>
    <details class="as-table"><summary>The pool as a table</summary><${PoolTable} entries=${entries} all=${all} residents=${snapshot.residents} /></details>
  <//>`;
}

/** How many cells are drawn: enough for all that was in use since the engine started, or the map would jump. */
function reachOf(highest, boot, { all, used }) {
  if (highest.current.boot !== boot) highest.current = { boot, cells: FEWEST_CELLS };
  while (highest.current.cells < used) highest.current.cells *= 2;
  return Math.min(all, highest.current.cells);
}

function Cells({ snapshot, cells, lit, onPoint, entries }) {
  const box = useRef(null);
  const id = useId();
  const width = useWidth(box, 200);
  const [pointed, setPointed] = useState(null);
  const pitch = Math.min(MAX_PITCH, Math.max(MIN_PITCH, Math.floor(Math.sqrt((width * HEIGHT) / cells))));
  const columns = Math.floor(width / pitch / 4) * 4;
  const height = Math.ceil(cells / columns) * pitch;
  const map = snapshot.page_map;
  const slots = bySlot(snapshot);
  const point = (event) => {
    const frame = event.currentTarget.getBoundingClientRect();
    const [column, row] = [Math.floor((event.clientX - frame.left) / pitch), Math.floor((event.clientY - frame.top) / pitch)];
    const cell = row * columns + column;
    const use = column < columns && cell < cells ? map.uses[cellsOf(map)[cell]] : null;
    const entry = use && entries.find((one) => (use.kind === "adapter" ? isMeant(one, use, slots.get(use.owner)) : one.key === use.kind));
    setPointed(use && { cell, use, x: column * pitch, y: row * pitch });
    onPoint(entry?.key ?? null);
  };
  const inner = pitch - (pitch > 7 ? 2 : 1);
  const corner = pitch > 9 ? 2 : 1;
  const hole = `M${pitch - inner} ${corner}a${corner} ${corner} 0 0 1 ${corner} ${-corner}h${inner - 2 * corner}a${corner} ${corner} 0 0 1 ${corner} ${corner}v${inner - 2 * corner}a${corner} ${corner} 0 0 1 ${-corner} ${corner}h${2 * corner - inner}a${corner} ${corner} 0 0 1 ${-corner} ${-corner}z`;
  return html`<div class="cells" ref=${box}>
    <svg width=${columns * pitch} height=${height} viewBox=${`0 0 ${columns * pitch} ${height}`} role="img" class=${lit ? "has-lit" : ""}
      aria-label=${`Map of the pool: ${Object.keys(KINDS).map((kind) => `${KINDS[kind].label} ${snapshot.pages[kind] ?? 0} pages`).join(", ")}`}
      data-cells=${extentOf(map).all} data-pages-per-cell=${map.pages_per_cell} onPointerMove=${point} onPointerLeave=${() => (setPointed(null), onPoint(null))}>
      <defs>
        <pattern id=${`${id}-grid`} width=${pitch} height=${pitch} patternUnits="userSpaceOnUse"><path class="grid-ground" fill-rule="evenodd" d=${`M0 0h${pitch}v${pitch}h${-pitch}z${hole}`} /></pattern>
        <pattern id="manylora-hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-ground" width="4" height="4" /><rect class="hatch-line" width="2" height="4" /></pattern>
        <pattern id="manylora-cross" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)"><rect class="cross-ground" width="4" height="4" /><rect class="cross-line" width="2" height="4" /></pattern>
      </defs>
      ${layersOf(map, columns, pitch, cells).map((layer) => {
        const resident = slots.get(layer.owner);
        const isLit = lit && isMeant(lit, layer, resident);
        return html`<path key=${`${layer.kind}-${layer.owner}`} class=${`use k-${layer.kind} ${layer.kind === "adapter" ? adapterColour(resident?.digest) : ""} ${isLit ? "lit" : ""}`}
          data-kind=${layer.kind} data-owner=${layer.owner} data-adapter=${resident?.digest} data-cells=${layer.cells} d=${layer.d} />`;
      })}
      <rect class="grid-over" width=${columns * pitch} height=${height} fill=${`url(#${id}-grid)`} />
      ${pointed && html`<rect class="pointed" x=${pointed.x + 0.5} y=${pointed.y - 0.5} width=${pitch} height=${pitch} rx=${corner} />`}
    </svg>
    ${pointed && html`<${CellTip} ...${pointed} width=${width} pitch=${pitch} perCell=${map.pages_per_cell} resident=${slots.get(pointed.use.owner)} />`}
  </div>`;
}

function CellTip({ cell, use, x, y, width, pitch, perCell, resident }) {
  const style = { top: `${y + pitch + 6}px`, ...(x > width / 2 ? { right: `${width - x - pitch}px` } : { left: `${x}px` }) };
  const owner = resident ? nameOf(resident.digest, resident.adapters) : use.kind === "adapter" ? "being loaded" : use.kind === "kv" || use.kind === "prefix" ? "of the base model" : "";
  const from = cell * perCell + 1;
  return html`<div class="tip" style=${style}><strong>${use.kind === "adapter" ? "Adapter's weights" : KINDS[use.kind].label}</strong>
    ${owner && html`<div>${owner}</div>`}<div class="quiet">${perCell > 1 ? `pages ${from}–${from + perCell - 1}` : `page ${from}`}</div></div>`;
}

const swatchOf = (entry) => (entry.kind === "adapter" && entry.digests.length === 1 ? adapterColour(entry.digests[0]) : entry.kind === "adapter" ? "a-any" : `k-${entry.kind}`);

function MapLegend({ entries, all, lit, onHover }) {
  const pinned = param("show");
  return html`<ul class="map-legend" aria-label="What the pages hold">
    ${entries.map((entry) => html`<li key=${entry.key}>
      <button type="button" data-entry=${entry.key} data-kind=${entry.kind} data-pages=${entry.pages} title=${`${entry.label}: ${entry.title}`}
        class=${lit?.key === entry.key ? "lit" : ""} aria-pressed=${pinned === entry.key}
        onPointerEnter=${() => onHover(entry.key)} onPointerLeave=${() => onHover(null)} onFocus=${() => onHover(entry.key)} onBlur=${() => onHover(null)}
        onClick=${() => setParams({ show: pinned === entry.key ? null : entry.key }, { replace: true })}>
        <span class=${`swatch ${swatchOf(entry)}`} /><span class="entry-label">${entry.label}</span><span class="entry-pages">${count(entry.pages)}</span>
      </button></li>`)}
    <li class="entry-total"><span>Pool</span><span class="entry-pages" data-total=${entries.reduce((sum, one) => sum + one.pages, 0)}>${count(all)}</span></li>
  </ul>`;
}

function PoolTable({ entries, all, residents }) {
  const prefixOf = (entry) => residents.filter((one) => entry.digests.includes(one.digest)).reduce((sum, one) => sum + one.prefix_pages, 0);
  const columns = [
    { key: "label", label: "Held by" },
    numbers("pages", "Pages", count),
    numbers("share", "Share", percent, (entry) => entry.pages / all),
    numbers("prefix", "Its prefix cache", count, (entry) => (entry.digests?.length ? prefixOf(entry) : undefined)),
  ];
  return html`<${Table} caption="Pages by what they hold" columns=${columns} rows=${entries} keyOf=${(entry) => entry.key} totals=${{ pages: all }} />`;
}

const HISTORY_HEIGHT = 104;
const MARGIN = { top: 8, right: 4, bottom: 18, left: 40 };
const STACKED = ["adapter", "kv", "prefix", "quarantine"];

/** Pages in use over the last two minutes, as far as this page was open. */
function History({ feed, of: all }) {
  const box = useRef(null);
  const width = useWidth(box, 200);
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (feed.isPaused) return undefined;
    // An idle engine sends nothing, but the axis moves on.
    const timer = setInterval(() => document.hidden || setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [feed.isPaused]);
  const until = feed.isPaused ? now : Math.max(now, feed.moments.at(-1)?.at ?? 0);
  const start = until - KEPT_MS;
  const moments = feed.moments.filter((one) => one.at <= until);
  const peak = Math.max(4, ...moments.map((one) => STACKED.reduce((sum, kind) => sum + (one.pages[kind] ?? 0), 0)));
  const ticks = niceTicks(peak).filter((tick, index, list) => list.length < 5 || index % 2 === 0);
  const top = niceTicks(peak).at(-1);
  const x = (at) => MARGIN.left + (Math.max(0, at - start) / KEPT_MS) * (width - MARGIN.left - MARGIN.right);
  const y = (pages) => MARGIN.top + (HISTORY_HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - pages / top);
  const last = moments.at(-1);
  return html`<div class="history" ref=${box}>
    <h3>In use over the last two minutes <small class="quiet">of ${count(all)} pages</small></h3>
    <svg class="chart" viewBox=${`0 0 ${width} ${HISTORY_HEIGHT}`} height=${HISTORY_HEIGHT} role="img" data-moments=${moments.length}
      aria-label=${last ? `Pages in use now: ${STACKED.map((kind) => `${KINDS[kind].label} ${last.pages[kind] ?? 0}`).join(", ")}` : "No pages seen yet"}>
      <${Grid} ticks=${ticks} x=${[MARGIN.left, width - MARGIN.right]} y=${y} format=${compact} />
      ${STACKED.map((kind, index) => html`<path key=${kind} class=${`use k-${kind} ${kind === "adapter" ? "a-any" : ""}`} data-kind=${kind} data-now=${last?.pages[kind] ?? 0} d=${areaOf(moments, index, until, x, y)} />`)}
      ${(width > 420 ? [120, 90, 60, 30, 0] : [120, 60, 0]).map((ago) => html`<text key=${ago} x=${x(until - ago * 1000)} y=${HISTORY_HEIGHT - 3} text-anchor=${ago === 0 ? "end" : ago === 120 ? "start" : "middle"}>${ago ? `${ago} s ago` : "now"}</text>`)}
    </svg>
  </div>`;
}

/** Between the sum of the kinds below and with this one; each moment holds until the next. */
function areaOf(moments, index, until, x, y) {
  if (!moments.length) return "";
  const sumOf = (one, upTo) => STACKED.slice(0, upTo).reduce((sum, kind) => sum + (one.pages[kind] ?? 0), 0);
  const edge = (upTo) => moments.flatMap((one, at) => {
    const level = y(sumOf(one, upTo)).toFixed(1);
    return [`${x(one.at).toFixed(1)} ${level}`, `${x(moments[at + 1]?.at ?? until).toFixed(1)} ${level}`];
  });
  return `M${edge(index + 1).join("L")}L${edge(index).reverse().join("L")}Z`;
}
