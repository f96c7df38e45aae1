// The last steps: the requests in each by adapter, its tokens, and how long it took.
import { html } from "../../lib.js";
import { count, seconds } from "../../format.js";
import { Card, Empty } from "../../ui.js";
import { Legend, TimeChart } from "../../charts.js";
import { adapterColour, nameOf } from "./pool.js";

/** Heights in pixels: requests lie above, their tokens below, with a gap between. */
const REQUESTS = 132;
const GAP = 20;
const TOKENS = 46;
const BELOW = 6;
const MARGIN = { left: 34, right: 46, top: 8, bottom: GAP + TOKENS + BELOW };
const HEIGHT = MARGIN.top + REQUESTS + MARGIN.bottom;

/**
 * The steps whose requests are known by adapter, with their figures.
 * @returns {{series: {key: string, label: string, className: string, values: number[], total: number}[], steps: object[]}}
 */
function compositionOf({ batches, last_steps: lastSteps }) {
  const stats = new Map(lastSteps.map((one) => [one.step, one]));
  const rows = (batches?.steps ?? []).filter(([step]) => stats.has(step));
  const names = batches?.adapters ?? [];
  const column = (key, label, className, at) => {
    const values = rows.map((row) => row[at]);
    return { key, label, className, values, total: values.reduce((a, b) => a + b, 0) };
  };
  const series = [
    column("base", "Base", "s-base", 1),
    ...names.map(({ digest, adapters }, index) => column(digest, nameOf(digest, adapters), adapterColour(digest), index + 2)),
    column("others", "Other adapters", "s-other", names.length + 2),
  ].filter((one) => one.total > 0);
  return { series, steps: rows.map(([step]) => stats.get(step)) };
}

export function Steps({ snapshot }) {
  const { series, steps } = compositionOf(snapshot);
  return html`<${Card} title="Batches" note=${`the last ${steps.length} steps, the newest right`}>
    ${steps.length ? html`<${Chart} series=${series} steps=${steps} />` : html`<${Empty} title="No step yet.">Requests that arrive together are computed together, for adapters of all tenants in one step.<//>`}
  <//>`;
}

function Chart({ series, steps }) {
  const sums = steps.map((_, index) => series.reduce((sum, one) => sum + one.values[index], 0));
  const most = Math.max(...sums, 1);
  const mostTokens = Math.max(...steps.map((one) => one.tokens), 1);
  const longest = Math.max(...steps.map((one) => one.seconds), 1e-6);
  const floor = HEIGHT - BELOW;
  const draw = ({ x, y, step, width }) => {
    const bar = Math.max(1, Math.min(14, step * 0.78));
    const column = (index, low, high) => rect(x(index) - bar / 2, high, bar, low - high);
    const timeY = (value) => y((value / longest / 1.08) * most);
    const tokensY = (value) => floor - (TOKENS * value) / mostTokens;
    const tokens = (low, high) => steps.map((one, index) => column(index, tokensY(low(one)), tokensY(high(one)))).join("");
    const decode = (one) => one.tokens - one.prefill_tokens;
    const line = steps.map((one, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${timeY(one.seconds).toFixed(1)}`).join("");
    let below = steps.map(() => 0);
    return html`
      ${series.map((one) => {
        const next = below.map((value, index) => value + one.values[index]);
        const d = steps.map((_, index) => column(index, y(below[index]), y(next[index]))).join("");
        below = next;
        return html`<path key=${one.key} class=${`use ${one.className}`} data-series=${one.key} data-total=${one.total} d=${d} />`;
      })}
      <path class="step-line-under" d=${line} /><path class="step-line" d=${line} />
      <text x=${width - MARGIN.right + 6} y=${timeY(longest) + 4}>${seconds(longest)}</text>
      <text x=${MARGIN.left} y=${floor - TOKENS - 5}>tokens, at most ${count(mostTokens)}</text>
      <path class="use t-decode" d=${tokens(() => 0, decode)} />
      <path class="use t-prefill" d=${tokens(decode, (one) => one.tokens)} />
      <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${floor} y2=${floor} />`;
  };
  const rowsAt = (at) => [
    ...series.filter((one) => one.values[at] > 0).reverse().map((one) => ({ label: one.label, colour: one.className, value: one.values[at] })),
    { label: "Prompt tokens", value: count(steps[at].prefill_tokens) },
    { label: "Completion tokens", value: count(steps[at].tokens - steps[at].prefill_tokens) },
    { label: "Took", value: seconds(steps[at].seconds) },
  ];
  const said = `Requests in the last ${steps.length} steps: ${series.map((one) => `${one.label} ${one.total}`).join(", ")}`;
  const places = steps.map(({ step }) => ({ at: step, title: `Step ${count(step)}` }));
  const others = [{ key: "prompt", label: "Prompt tokens", className: "t-prefill" }, { key: "completion", label: "Completion tokens", className: "t-decode" }, { key: "time", label: "Step time", className: "line" }];
  return html`<${TimeChart} places=${places} label="Steps" said=${said} height=${HEIGHT} margin=${MARGIN} reach=${floor - MARGIN.top} ticks=${[0, most]} format=${count} draw=${draw} rowsAt=${rowsAt} />
    <${Legend} series=${[...series, ...others]} format=${count} />`;
}

const rect = (x, y, width, height) => (height > 0 ? `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z` : "");
