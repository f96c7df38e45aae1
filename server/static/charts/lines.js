// Lines over time, with a gap wherever nothing was measured.
import { html } from "../lib.js";
import { TimeChart, colourOf, niceTicks } from "./frame.js";

const MARGIN = { top: 10, right: 6, bottom: 22, left: 56 };

/**
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
  return html`<${TimeChart} places=${points} label=${label} said=${said} height=${190} margin=${MARGIN} draw=${draw} rowsAt=${rowsAt}
    ticks=${ticks} format=${(tick) => (tick ? format(tick) : 0)} />`;
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
