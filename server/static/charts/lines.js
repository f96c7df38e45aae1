// Lines over time with a gap wherever nothing was measured; by hand in SVG, as the bars are.
import { html, useRef, useState } from "../lib.js";
import { useWidth } from "../ui.js";
import { colourOf, Tip, walk } from "./stacked_bars.js";
import { niceTicks } from "./scale.js";

const HEIGHT = 190;
const MARGIN = { top: 10, right: 6, bottom: 22, left: 56 };

/**
 * @param {{points: {at: number, label: string, title: string}[], label: string, format: (value: number) => string,
 *   series: {key: string, label: string, values: (number|null)[]}[], said?: string}} props One value for each point;
 *   the first series lies on top of the others. Between the first and the last series the ground is tinted.
 */
export function Lines({ points, series, label, format, said = label }) {
  const box = useRef(null);
  const width = useWidth(box);
  const [hovered, setHovered] = useState(null);
  const ticks = niceTicks(Math.max(0, ...series.flatMap((one) => one.values.map((value) => value ?? 0))) || 1);
  const plot = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const step = plot.width / Math.max(1, points.length);
  const x = (at) => MARGIN.left + (at + 0.5) * step;
  const y = (value) => MARGIN.top + plot.height * (1 - value / ticks.at(-1));
  const everyLabel = Math.ceil(points.length / Math.max(2, Math.floor(plot.width / 62)));
  return html`<div class="chart-box" ref=${box} role="group" aria-label=${`${label}, by arrow keys`} ...${walk(points.length, hovered, setHovered)}>
    <svg class="chart" viewBox=${`0 0 ${width} ${HEIGHT}`} height=${HEIGHT} role="img" aria-label=${said}>
      ${ticks.map((tick) => html`<g key=${tick}>
        <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(tick)} y2=${y(tick)} />
        <text x=${MARGIN.left - 6} y=${y(tick) + 4} text-anchor="end">${tick ? format(tick) : 0}</text>
      </g>`)}
      ${points.map((point, at) => at % everyLabel === 0 && html`<text key=${point.at} x=${x(at)} y=${HEIGHT - 6} text-anchor="middle">${point.label}</text>`)}
      ${runsOf(points.length, series).map((run) => html`<path class="band" d=${bandOf(run, series, x, y)} />`)}
      ${series.map((one, index) => html`<g key=${one.key} class=${`line l${index}`} data-series=${one.key}>
        ${runsOf(points.length, [one]).map((run) => html`<path d=${pathOf(run, one.values, x, y)} />`)}
        ${one.values.map((value, at) => value !== null && html`<circle key=${points[at].at} class=${colourOf(one, index)} cx=${x(at)} cy=${y(value)} r=${step > 14 || isAlone(one.values, at) ? 2.5 : 0.1}
          data-start=${new Date(points[at].at).toISOString()} data-value=${value} />`)}
      </g>`)}
      ${points.map((point, at) => html`<rect key=${point.at} class=${hovered === at ? "hover shown" : "hover"} x=${MARGIN.left + at * step} y=${MARGIN.top} width=${step} height=${plot.height} onMouseEnter=${() => setHovered(at)} />`)}
    </svg>
    ${hovered !== null && points[hovered] && html`<${Tip} title=${points[hovered].title} left=${x(hovered)} width=${width}
      rows=${series.map((one, index) => ({ label: one.label, colour: colourOf(one, index), value: format(one.values[hovered]) }))} />`}
  </div>`;
}

/** The stretches in which every series has values: [[first, ..., last], ...]. */
function runsOf(length, series) {
  const runs = [];
  let run = [];
  for (let at = 0; at < length; at += 1) {
    if (series.every((one) => one.values[at] !== null)) run.push(at);
    else if (run.length) runs.push(run), (run = []);
  }
  return run.length ? [...runs, run] : runs;
}

const isAlone = (values, at) => (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null;

const pathOf = (run, values, x, y) => run.map((at, index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(values[at]).toFixed(1)}`).join("");

const bandOf = (run, series, x, y) =>
  `${pathOf(run, series[0].values, x, y)}${pathOf([...run].reverse(), series.at(-1).values, x, y).replace("M", "L")}Z`;
