// Pages in use over the last two minutes, as far as this page was open.
import { html, useEffect, useRef, useState } from "../../lib.js";
import { Grid, niceTicks } from "../../charts/frame.js";
import { compact, count } from "../../format.js";
import { KEPT_MS } from "./feed.js";
import { useWidth } from "../../ui.js";
import { KINDS } from "./pool.js";

const HEIGHT = 104;
const MARGIN = { top: 8, right: 4, bottom: 18, left: 40 };
const STACKED = ["adapter", "kv", "prefix", "quarantine"];
const CLASSES = { adapter: "a-any", kv: "k-kv", prefix: "k-prefix", quarantine: "k-quarantine" };

export function History({ feed, of: all }) {
  const box = useRef(null);
  const width = useWidth(box, 200);
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    // An idle engine sends nothing, but the axis moves on.
    const timer = setInterval(() => document.hidden || feed.isPaused.value || setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const until = feed.isPaused.value ? now : Math.max(now, feed.moments.at(-1)?.at ?? 0);
  const start = until - KEPT_MS;
  const moments = feed.moments.filter((one) => one.at <= until);
  const peak = Math.max(4, ...moments.map((one) => STACKED.reduce((sum, kind) => sum + (one.pages[kind] ?? 0), 0)));
  const ticks = niceTicks(peak).filter((tick, index, list) => list.length < 5 || index % 2 === 0);
  const top = niceTicks(peak).at(-1);
  const x = (at) => MARGIN.left + (Math.max(0, at - start) / KEPT_MS) * (width - MARGIN.left - MARGIN.right);
  const y = (pages) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - pages / top);
  const last = moments.at(-1);
  return html`<div class="history" ref=${box}>
    <h3>In use over the last two minutes <small class="quiet">of ${count(all)} pages</small></h3>
    <svg class="chart" viewBox=${`0 0 ${width} ${HEIGHT}`} height=${HEIGHT} role="img" data-moments=${moments.length}
      aria-label=${last ? `Pages in use now: ${STACKED.map((kind) => `${KINDS[kind].label} ${last.pages[kind] ?? 0}`).join(", ")}` : "No pages seen yet"}>
      <${Grid} ticks=${ticks} x=${[MARGIN.left, width - MARGIN.right]} y=${y} format=${compact} />
      ${STACKED.map((kind, index) => html`<path key=${kind} class=${`use ${CLASSES[kind]} k-${kind}`} data-kind=${kind} data-now=${last?.pages[kind] ?? 0} d=${areaOf(moments, index, until, x, y)} />`)}
      ${(width > 420 ? [120, 90, 60, 30, 0] : [120, 60, 0]).map((ago) => html`<text key=${ago} x=${x(until - ago * 1000)} y=${HEIGHT - 3} text-anchor=${ago === 0 ? "end" : ago === 120 ? "start" : "middle"}>${ago ? `${ago} s ago` : "now"}</text>`)}
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
