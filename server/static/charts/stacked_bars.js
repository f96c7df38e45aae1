// Bars over time, each made of its series.
import { html } from "../lib.js";
import { compact, round } from "../format.js";
import { TimeChart, colourOf, niceTicks } from "./frame.js";

const MARGIN = { top: 10, right: 4, bottom: 22, left: 46 };

/**
 * @param {{buckets: {at: number, label: string, title: string}[], label: string,
 *   series: {key: string, label: string, isOther?: boolean, total?: number, values: number[]}[],
 *   format?: (value: number) => string, exact?: (value: number) => string}} props `values` has one number for each
 *   bucket; the first series lies lowest. `format` is for the axis, `exact` for what is pointed at.
 */
export function StackedBars({ buckets, series, label, format = compact, exact = format }) {
  const sums = buckets.map((_, at) => series.reduce((sum, one) => sum + one.values[at], 0));
  const said = `${label}: ${exact(sums.reduce((a, b) => a + b, 0))} in all`;
  const rowsAt = (at) => {
    const rows = series.map((one, index) => ({ label: one.label, colour: colourOf(one, index), value: one.values[at] })).filter((one) => one.value > 0);
    return [...rows.reverse().map((row) => ({ ...row, value: exact(row.value) })), { label: "Total", value: exact(sums[at]) }];
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
  return html`<${TimeChart} places=${buckets} label=${label} said=${said} height=${240} margin=${MARGIN} draw=${draw} rowsAt=${rowsAt}
    ticks=${niceTicks(Math.max(...sums) || 1, format === compact ? 1 : 0)} format=${format === compact ? round : format} />`;
}
