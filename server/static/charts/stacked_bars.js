// Bars over time, each made of its series; in SVG, so that they can be read by machines, printed and themed.
import { html, useRef, useState } from "../lib.js";
import { compact, round } from "../format.js";
import { useWidth } from "../ui.js";
import { niceTicks } from "./scale.js";

const HEIGHT = 240;
const MARGIN = { top: 10, right: 4, bottom: 22, left: 46 };

/** The class that gives a series its colour. @param {{isOther?: boolean}} series */
export const colourOf = (series, index) => (series.isOther ? "s-other" : `s${index % COLOURS}`);
const COLOURS = 12;

/** The names of the series with their colours, and their totals. */
export function Legend({ series, format = compact }) {
  return html`<ul class="legend">
    ${series.map((one, index) => html`<li key=${one.key} data-series=${one.key}><span class=${`swatch ${colourOf(one, index)}`} />${one.label}${one.total !== undefined && html` <span class="quiet">${format(one.total)}</span>`}</li>`)}
  </ul>`;
}

/** What makes arrow keys walk through `length` places of a chart, and leaving it end that. */
export function walk(length, at, setAt) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  return {
    tabindex: 0,
    onMouseLeave: () => setAt(null),
    onBlur: () => setAt(null),
    onKeyDown: (event) => {
      if (event.key === "Escape") setAt(null);
      if (!(event.key in steps) || !length) return;
      event.preventDefault();
      setAt(at === null ? (steps[event.key] > 0 ? 0 : length - 1) : Math.min(length - 1, Math.max(0, at + steps[event.key])));
    },
  };
}

/**
 * @param {{buckets: {at: number, label: string, title: string}[], label: string,
 *   series: {key: string, label: string, isOther?: boolean, total?: number, values: number[]}[],
 *   format?: (value: number) => string, exact?: (value: number) => string}} props `values` has one number for each
 *   bucket; the first series lies lowest. `format` is for the axis, `exact` for what is pointed at.
 */
export function StackedBars({ buckets, series, label, format = compact, exact = format }) {
  const box = useRef(null);
  const width = useWidth(box);
  const [hovered, setHovered] = useState(null);
  const sums = buckets.map((_, at) => series.reduce((sum, one) => sum + one.values[at], 0));
  const ticks = niceTicks(Math.max(...sums) || 1, format === compact ? 1 : 0);
  const top = ticks.at(-1);
  const plot = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const step = plot.width / Math.max(1, buckets.length);
  const gap = step > 6 ? Math.min(4, step * 0.2) : step > 3 ? 1 : 0;
  const y = (value) => MARGIN.top + plot.height * (1 - value / top);
  const everyLabel = Math.ceil(buckets.length / Math.max(2, Math.floor(plot.width / 62)));
  const said = `${label}: ${exact(sums.reduce((a, b) => a + b, 0))} in all`;
  return html`<div class="chart-box" ref=${box} role="group" aria-label=${`${label}, by arrow keys`} ...${walk(buckets.length, hovered, setHovered)}>
    <svg class="chart" viewBox=${`0 0 ${width} ${HEIGHT}`} height=${HEIGHT} role="img" aria-label=${said}>
      ${ticks.map((tick) => html`<g key=${tick}>
        <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(tick)} y2=${y(tick)} />
        <text x=${MARGIN.left - 6} y=${y(tick) + 4} text-anchor="end">${(format === compact ? round : format)(tick)}</text>
      </g>`)}
      ${buckets.map((bucket, at) => {
        let base = 0;
        return html`<g key=${bucket.at} class="bar" data-bucket=${bucket.label} data-start=${new Date(bucket.at).toISOString()} data-sum=${sums[at]}>
          ${series.map((one, index) => {
            const value = one.values[at];
            const from = y(base);
            base += value;
            return value > 0 && html`<rect key=${one.key} class=${colourOf(one, index)} data-series=${one.key} data-value=${value}
              x=${MARGIN.left + at * step + gap / 2} y=${y(base)} width=${Math.max(0.5, step - gap)} height=${Math.max(0.5, from - y(base))} />`;
          })}
          <rect class=${hovered === at ? "hover shown" : "hover"} x=${MARGIN.left + at * step} y=${MARGIN.top} width=${step} height=${plot.height} onMouseEnter=${() => setHovered(at)} />
          ${at % everyLabel === 0 && html`<text x=${MARGIN.left + (at + 0.5) * step} y=${HEIGHT - 6} text-anchor="middle">${bucket.label}</text>`}
        </g>`;
      })}
    </svg>
    ${hovered !== null && buckets[hovered] && html`<${BarTip} bucket=${buckets[hovered]} at=${hovered} series=${series} sum=${sums[hovered]} format=${exact}
      left=${MARGIN.left + (hovered + 0.5) * step} width=${width} />`}
  </div>`;
}

function BarTip({ bucket, at, series, sum, format, left, width }) {
  const rows = series.map((one, index) => ({ label: one.label, colour: colourOf(one, index), value: one.values[at] })).filter((one) => one.value > 0);
  const shown = rows.reverse().map((row) => ({ ...row, value: format(row.value) }));
  return html`<${Tip} title=${bucket.title} rows=${[...shown, { label: "Total", value: format(sum) }]} left=${left} width=${width} />`;
}

/** What a chart says of the place that is pointed at. @param {{rows: {label: string, colour?: string, value: string}[]}} props */
export function Tip({ title, rows, left, width }) {
  const style = left > width / 2 ? { right: `${width - left + 10}px` } : { left: `${left + 10}px` };
  return html`<div class="tip" style=${style} role="status">
    <strong>${title}</strong>
    <table><tbody>
      ${rows.map((row) => html`<tr><th scope="row">${row.colour && html`<span class=${`swatch ${row.colour}`} /> `}${row.label}</th><td class="number">${row.value}</td></tr>`)}
    </tbody></table>
  </div>`;
}
