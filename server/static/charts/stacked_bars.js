// Bars over time, each made of its series; in SVG, so that they can be read by machines, printed and themed.
import { html, useEffect, useRef, useState } from "../lib.js";
import { compact } from "../format.js";
import { niceTicks } from "./scale.js";

const HEIGHT = 240;
const MARGIN = { top: 10, right: 4, bottom: 22, left: 46 };

/** The class that gives a series its colour. @param {{isOther?: boolean}} series */
export const colourOf = (series, index) => (series.isOther ? "s-other" : `s${index % 8}`);

/** The names of the series with their colours, and their totals. */
export function Legend({ series, format = compact }) {
  return html`<ul class="legend">
    ${series.map((one, index) => html`<li key=${one.key} data-series=${one.key}><span class=${`swatch ${colourOf(one, index)}`} />${one.label}${one.total !== undefined && html` <span class="quiet">${format(one.total)}</span>`}</li>`)}
  </ul>`;
}

/**
 * @param {{buckets: {at: number, label: string, title: string}[], label: string,
 *   series: {key: string, label: string, isOther?: boolean, total?: number, values: number[]}[],
 *   format?: (value: number) => string}} props `values` has one number for each bucket; the first series lies lowest.
 */
export function StackedBars({ buckets, series, label, format = compact }) {
  const box = useRef(null);
  const [width, setWidth] = useState(640);
  const [hovered, setHovered] = useState(null);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.max(240, Math.round(entry.contentRect.width))));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  const sums = buckets.map((_, at) => series.reduce((sum, one) => sum + one.values[at], 0));
  const ticks = niceTicks(Math.max(...sums, 1));
  const top = ticks.at(-1);
  const plot = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const step = plot.width / Math.max(1, buckets.length);
  const gap = step > 6 ? Math.min(4, step * 0.2) : step > 3 ? 1 : 0;
  const y = (value) => MARGIN.top + plot.height * (1 - value / top);
  const everyLabel = Math.ceil(buckets.length / Math.max(2, Math.floor(plot.width / 62)));
  return html`<div class="chart-box" ref=${box} onMouseLeave=${() => setHovered(null)}>
    <svg class="chart" viewBox=${`0 0 ${width} ${HEIGHT}`} height=${HEIGHT} role="img" aria-label=${`${label}: ${format(sums.reduce((a, b) => a + b, 0))} in all`}>
      ${ticks.map((tick) => html`<g key=${tick}>
        <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(tick)} y2=${y(tick)} />
        <text x=${MARGIN.left - 6} y=${y(tick) + 4} text-anchor="end">${format(tick)}</text>
      </g>`)}
      ${buckets.map((bucket, at) => {
        let base = 0;
        return html`<g key=${bucket.at} class="bar" data-bucket=${bucket.label}>
          ${series.map((one, index) => {
            const value = one.values[at];
            const from = y(base);
            base += value;
            return value > 0 && html`<rect key=${one.key} class=${colourOf(one, index)} data-series=${one.key} data-value=${value}
              x=${MARGIN.left + at * step + gap / 2} y=${y(base)} width=${Math.max(0.5, step - gap)} height=${Math.max(0.5, from - y(base))} />`;
          })}
          <rect class="hover" x=${MARGIN.left + at * step} y=${MARGIN.top} width=${step} height=${plot.height} onMouseEnter=${() => setHovered(at)} />
          ${at % everyLabel === 0 && html`<text x=${MARGIN.left + (at + 0.5) * step} y=${HEIGHT - 6} text-anchor="middle">${bucket.label}</text>`}
        </g>`;
      })}
    </svg>
    ${hovered !== null && buckets[hovered] && html`<${Tip} bucket=${buckets[hovered]} at=${hovered} series=${series} sum=${sums[hovered]} format=${format}
      left=${MARGIN.left + (hovered + 0.5) * step} width=${width} />`}
  </div>`;
}

function Tip({ bucket, at, series, sum, format, left, width }) {
  const rows = series.map((one, index) => ({ ...one, colour: colourOf(one, index), value: one.values[at] })).filter((one) => one.value > 0);
  const style = left > width / 2 ? { right: `${width - left + 10}px` } : { left: `${left + 10}px` };
  return html`<div class="tip" style=${style}>
    <strong>${bucket.title}</strong>
    <table><tbody>
      ${rows.reverse().map((row) => html`<tr><th><span class=${`swatch ${row.colour}`} /> ${row.label}</th><td class="number">${format(row.value)}</td></tr>`)}
      <tr><th>Total</th><td class="number">${format(sum)}</td></tr>
    </tbody></table>
  </div>`;
}
