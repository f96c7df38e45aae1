// Charts: bars and lines over time with axes, legend, arrow keys and tip, and a bar of shares. SVG by hand, which can be read
// by machines, printed and themed.
import { html, useRef, useState } from "./lib.js";
import { compact, count, percent, round } from "./format.js";
import { useWidth } from "./ui.js";

const COLOURS = 12;

/** The class that gives a series its colour. @param {{isOther?: boolean, className?: string}} series */
const colourOf = (series, index) => series.className ?? (series.isOther ? "s-other" : `s${index % COLOURS}`);

/** The names of the series with their colours, and their totals. */
export const Legend = ({ series, format = compact }) => html`<ul class="legend">
  ${series.map((one, index) => html`<li key=${one.key} data-series=${one.key} data-total=${one.total}><span class=${`swatch ${colourOf(one, index)}`} />${one.label}
    ${one.total !== undefined && html`<span class="quiet">${format(one.total)}</span>`}</li>`)}
</ul>`;

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
 *   reach?: number, rowsAt: (at: number) => {label: string, colour?: string, value: string}[]}} props `draw` gives the shapes; `x` is the
 *   middle of a place. `rowsAt` gives the rows of the tip. `reach` is the height in pixels in which the pointer opens the tip.
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

const BARS_MARGIN = { top: 10, right: 4, bottom: 22, left: 46 };

/**
 * Bars over time, each made of its series.
 * @param {{buckets: {at: number, label: string, title: string}[], label: string,
 *   series: {key: string, label: string, isOther?: boolean, total?: number, values: number[]}[],
 *   format?: (value: number) => string, exact?: (value: number) => string}} props `values` has one number for each
 *   bucket; the first series lies lowest. `format` is for the axis, `exact` for what is pointed at.
 */
export function StackedBars({ buckets, series, label, format = compact, exact = format }) {
  const sums = buckets.map((_, at) => series.reduce((sum, one) => sum + one.values[at], 0));
  const said = `${label}: ${exact(sums.reduce((a, b) => a + b, 0))} in all`;
  const rowsAt = (at) => {
    const rows = series.map((one, index) => ({ label: one.label, colour: colourOf(one, index), value: one.values[at] }));
    const used = rows.filter(({ value }) => value > 0).reverse();
    return [...used, { label: "Total", value: sums[at] }].map((row) => ({ ...row, value: exact(row.value) }));
  };
  const draw = ({ x, y, step }) => {
    const gap = step > 6 ? Math.min(4, step * 0.2) : step > 3 ? 1 : 0;
    return buckets.map((bucket, at) => {
      let base = 0;
      return html`<g key=${bucket.at} class="bar" data-bucket=${bucket.label} data-start=${new Date(bucket.at).toISOString()} data-sum=${sums[at]}>
        ${series.map((one, index) => {
          const value = one.values[at];
          const from = y(base);
          base += value;
          return value > 0 && html`<rect key=${one.key} class=${colourOf(one, index)} data-series=${one.key} data-value=${value}
            x=${x(at) - (step - gap) / 2} y=${y(base)} width=${Math.max(0.5, step - gap)} height=${Math.max(0.5, from - y(base))} />`;
        })}
      </g>`;
    });
  };
  return html`<${TimeChart} places=${buckets} label=${label} said=${said} height=${240} margin=${BARS_MARGIN} draw=${draw} rowsAt=${rowsAt}
    ticks=${niceTicks(Math.max(...sums) || 1, format === compact ? 1 : 0)} format=${format === compact ? round : format} />`;
}

const LINES_MARGIN = { top: 10, right: 6, bottom: 22, left: 56 };

/**
 * Lines over time, with a gap wherever nothing was measured.
 * @param {{points: {at: number, label: string, title: string}[], label: string, format: (value: number) => string,
 *   series: {key: string, label: string, values: (number|null)[]}[], said: string}} props One value for each point;
 *   the first series lies on top of the others. Between the first and the last series the ground is tinted.
 */
export function Lines({ points, series, label, format, said }) {
  const ticks = niceTicks(Math.max(0, ...series.flatMap((one) => one.values.map((value) => value ?? 0))) || 1);
  const rowsAt = (at) => series.map((one, index) => ({ label: one.label, colour: colourOf(one, index), value: format(one.values[at]) }));
  const draw = ({ x, y, step }) => html`
    ${runsOf(points.length, series).map((run) => html`<path class="band" d=${bandOf(run, series, x, y)} />`)}
    ${series.map((one, index) => html`<g key=${one.key} class=${`line l${index}`} data-series=${one.key}>
      ${runsOf(points.length, [one]).map((run) => html`<path d=${pathOf(run, one.values, x, y)} />`)}
      ${one.values.map((value, at) => value !== null && html`<circle key=${points[at].at} class=${colourOf(one, index)} cx=${x(at)} cy=${y(value)} r=${step > 14 || isAlone(one.values, at) ? 2.5 : 0.1}
        data-start=${new Date(points[at].at).toISOString()} data-value=${value} />`)}
    </g>`)}`;
  return html`<${TimeChart} places=${points} label=${label} said=${said} height=${190} margin=${LINES_MARGIN} draw=${draw} rowsAt=${rowsAt}
    ticks=${ticks} format=${(tick) => (tick ? format(tick) : 0)} />`;
}

/** The stretches in which every series has values: [[first, ..., last], ...]. */
function runsOf(length, series) {
  const runs = [[]];
  for (let at = 0; at < length; at += 1) {
    if (series.every((one) => one.values[at] !== null)) runs.at(-1).push(at);
    else runs.push([]);
  }
  return runs.filter((run) => run.length);
}

const isAlone = (values, at) => (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null;

const pathOf = (run, values, x, y) => run.map((at, index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(values[at]).toFixed(1)}`).join("");

const bandOf = (run, series, x, y) =>
  `${pathOf(run, series[0].values, x, y)}${pathOf([...run].reverse(), series.at(-1).values, x, y).replace("M", "L")}Z`;

/** One slim bar made of parts of a whole. @param {{label: string, parts: {key: string, label: string, colour: string, value: number}[], format?: (value: number, share: number) => string}} props */
export function ShareBar({ label, parts, format = (value, share) => `${count(value)} · ${percent(share)}` }) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  let from = 0;
  return html`<div class="share-bar">
    <svg viewBox="0 0 100 1" preserveAspectRatio="none" height="12" role="img" aria-label=${`${label}: ${parts.map((part) => `${part.label} ${count(part.value)}`).join(", ")}`}>
      ${parts.map((part) => {
        const width = whole ? (100 * part.value) / whole : 0;
        from += width;
        return width > 0 && html`<rect key=${part.key} class=${part.colour} data-part=${part.key} data-value=${part.value} x=${from - width} y="0" width=${width} height="1" />`;
      })}
    </svg>
    <${Legend} series=${parts.map((part) => ({ ...part, className: part.colour, total: part.value }))} format=${(value) => format(value, whole ? value / whole : 0)} />
  </div>`;
}
