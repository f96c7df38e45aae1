// What charts over time share: axes, labels, arrow keys and the tip. SVG by hand, which can be read by machines,
// printed and themed.
import { html, useRef, useState } from "../lib.js";
import { compact } from "../format.js";
import { useWidth } from "../ui.js";

/** The class that gives a series its colour. @param {{isOther?: boolean}} series */
export const colourOf = (series, index) => (series.isOther ? "s-other" : `s${index % COLOURS}`);
const COLOURS = 12;

/** The names of the series with their colours, and their totals. */
export function Legend({ series, format = compact }) {
  return html`<ul class="legend">
    ${series.map((one, index) => html`<li key=${one.key} data-series=${one.key}><span class=${`swatch ${one.className ?? colourOf(one, index)}`} />${one.label}${one.total !== undefined && html` <span class="quiet">${format(one.total)}</span>`}</li>`)}
  </ul>`;
}

/** Three to seven round ticks from 0 to at least `top`, `least` or more apart; with a `least` all are whole. */
export function niceTicks(top, least = 0) {
  const rough = Math.max(top / 5, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough && (!least || Number.isInteger(size)));
  const ticks = [];
  for (let tick = 0; tick < top + step * 0.999; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

/** What makes arrow keys walk through `length` places of a chart, and leaving it end that. */
function walk(length, at, setAt) {
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

/** Lines with their values at the left. @param {{ticks: number[], x: [number, number], y: (tick: number) => number, format: (tick: number) => unknown}} props */
export const Grid = ({ ticks, x: [left, right], y, format }) =>
  ticks.map((tick) => html`<g key=${tick}><line class="grid" x1=${left} x2=${right} y1=${y(tick)} y2=${y(tick)} /><text x=${left - 6} y=${y(tick) + 4} text-anchor="end">${format(tick)}</text></g>`);

/**
 * A chart of places in time side by side.
 * @param {{places: {at: number, label: string, title: string}[], label: string, said: string, height: number,
 *   margin: {top: number, right: number, bottom: number, left: number}, ticks: number[], format: (tick: number) => unknown,
 *   draw: (scales: {x: (at: number) => number, y: (value: number) => number, step: number, width: number}) => unknown,
 *   reach?: number, rowsAt: (at: number) => {label: string, colour?: string, value: string}[]}} props `draw` gives the shapes, `x` being the
 *   middle of a place; `rowsAt` is what is told of the place that is pointed at; `reach` is the height
 *   that can be pointed at, in pixels.
 */
export function TimeChart({ places, label, said, height, margin, ticks, format, draw, rowsAt, reach = height - margin.top - margin.bottom }) {
  const box = useRef(null);
  const width = useWidth(box);
  const [hovered, setHovered] = useState(null);
  const plotWidth = width - margin.left - margin.right;
  const step = plotWidth / Math.max(1, places.length);
  const x = (at) => margin.left + (at + 0.5) * step;
  const y = (value) => margin.top + (height - margin.top - margin.bottom) * (1 - value / ticks.at(-1));
  const everyLabel = Math.ceil(places.length / Math.max(2, Math.floor(plotWidth / 62)));
  return html`<div class="chart-box" ref=${box} role="group" aria-label=${`${label}, by arrow keys`} ...${walk(places.length, hovered, setHovered)}>
    <svg class="chart" viewBox=${`0 0 ${width} ${height}`} height=${height} role="img" aria-label=${said}>
      <${Grid} ticks=${ticks} x=${[margin.left, width - margin.right]} y=${y} format=${format} />
      ${draw({ x, y, step, width })}
      ${places.map((place, at) => html`<g key=${place.at}>
        <rect class=${hovered === at ? "hover shown" : "hover"} x=${margin.left + at * step} y=${margin.top} width=${step} height=${reach} onMouseEnter=${() => setHovered(at)} />
        ${place.label && at % everyLabel === 0 && html`<text x=${x(at)} y=${height - 6} text-anchor="middle">${place.label}</text>`}</g>`)}
    </svg>
    ${hovered !== null && places[hovered] && html`<${Tip} title=${places[hovered].title} rows=${rowsAt(hovered)} left=${x(hovered)} width=${width} />`}
  </div>`;
}

/** What a chart says of the place that is pointed at. @param {{rows: {label: string, colour?: string, value: string}[]}} props */
function Tip({ title, rows, left, width }) {
  const style = left > width / 2 ? { right: `${width - left + 10}px` } : { left: `${left + 10}px` };
  return html`<div class="tip" style=${style} role="status">
    <strong>${title}</strong>
    <table><tbody>
      ${rows.map((row) => html`<tr><th scope="row">${row.colour && html`<span class=${`swatch ${row.colour}`} /> `}${row.label}</th><td class="number">${row.value}</td></tr>`)}
    </tbody></table>
  </div>`;
}
