// The last steps: who was in each, its tokens, and how long it took.
import { html, useRef, useState } from "../../lib.js";
import { count, seconds } from "../../format.js";
import { Card, Empty, useWidth } from "../../ui.js";
import { adapterColour, nameOf } from "./colours.js";

const WHO = 132;
const TOKENS = 46;
const GAP = 20;
const MARGIN = { left: 34, right: 46, top: 8, bottom: 6 };

/**
 * The steps of which it is known who was in them, with what they did.
 * @returns {{series: {key: string, label: string, className: string, values: number[], total: number}[], steps: object[]}}
 */
export function compositionOf({ batches, last_steps: lastSteps }) {
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
    ${steps.length ? html`<${Chart} series=${series} steps=${steps} />` : html`<${Empty} title="No step yet.">Whatever is asked at once is computed together, adapters of all tenants in one step.<//>`}
  <//>`;
}

function Chart({ series, steps }) {
  const box = useRef(null);
  const width = useWidth(box);
  const [at, setAt] = useState(null);
  const sums = steps.map((_, index) => series.reduce((sum, one) => sum + one.values[index], 0));
  const most = Math.max(...sums, 1);
  const mostTokens = Math.max(...steps.map((one) => one.tokens), 1);
  const longest = Math.max(...steps.map((one) => one.seconds), 1e-6);
  const plot = width - MARGIN.left - MARGIN.right;
  const step = plot / steps.length;
  const bar = Math.max(1, Math.min(14, step * 0.78));
  const x = (index) => MARGIN.left + (index + 0.5) * step;
  const y = (value, top) => MARGIN.top + WHO * (1 - value / top);
  const floor = MARGIN.top + WHO + GAP + TOKENS;
  const tokens = (value) => (TOKENS * value) / mostTokens;
  const bars = (from, to) => steps.map((_, index) => (to[index] > from[index] ? rect(x(index) - bar / 2, y(to[index], most), bar, y(from[index], most) - y(to[index], most)) : "")).join("");
  const line = steps.map((one, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(one.seconds, longest * 1.08).toFixed(1)}`).join("");
  const walk = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    setAt(Math.min(steps.length - 1, Math.max(0, (at ?? steps.length) + move)));
  };
  const point = (event) => {
    const index = Math.floor((event.clientX - box.current.getBoundingClientRect().left - MARGIN.left) / step);
    setAt(index >= 0 && index < steps.length ? index : null);
  };
  let below = steps.map(() => 0);
  return html`<div class="chart-box" ref=${box} tabindex="0" role="group" aria-label="Steps, one by one with the arrow keys" onKeyDown=${walk} onBlur=${() => setAt(null)} onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
      <svg class="chart" viewBox=${`0 0 ${width} ${floor + MARGIN.bottom}`} height=${floor + MARGIN.bottom} role="img" data-steps=${steps.length} data-last=${steps.at(-1).step}
        aria-label=${`Requests in the last ${steps.length} steps: ${series.map((one) => `${one.label} ${one.total}`).join(", ")}`}>
        ${[0, most].map((tick) => html`<g key=${tick}><line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(tick, most)} y2=${y(tick, most)} /><text x=${MARGIN.left - 6} y=${y(tick, most) + 4} text-anchor="end">${tick}</text></g>`)}
        ${series.map((one) => {
          const next = below.map((value, index) => value + one.values[index]);
          const d = bars(below, next);
          below = next;
          return html`<path key=${one.key} class=${`use ${one.className}`} data-series=${one.key} data-total=${one.total} d=${d} />`;
        })}
        <path class="step-line-under" d=${line} /><path class="step-line" data-longest=${longest} d=${line} />
        <text x=${width - MARGIN.right + 6} y=${y(longest, longest * 1.08) + 4}>${seconds(longest)}</text>
        <text x=${MARGIN.left} y=${MARGIN.top + WHO + GAP - 5}>tokens, at most ${count(mostTokens)}</text>
        <path class="use t-decode" data-tokens="decode" d=${steps.map((one, index) => rect(x(index) - bar / 2, floor - tokens(one.tokens - one.prefill_tokens), bar, tokens(one.tokens - one.prefill_tokens))).join("")} />
        <path class="use t-prefill" data-tokens="prefill" d=${steps.map((one, index) => rect(x(index) - bar / 2, floor - tokens(one.tokens), bar, tokens(one.prefill_tokens))).join("")} />
        <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${floor} y2=${floor} />
        ${at !== null && steps[at] && html`<rect class="hover shown" x=${x(at) - step / 2} y=${MARGIN.top} width=${step} height=${floor - MARGIN.top} />`}
      </svg>
      ${at !== null && steps[at] && html`<${StepTip} step=${steps[at]} at=${at} series=${series} left=${x(at)} width=${width} />`}
    </div>
    <ul class="legend" aria-label="In the steps">
      ${series.map((one) => html`<li key=${one.key} data-series=${one.key}><span class=${`swatch ${one.className}`} />${one.label} <span class="quiet">${count(one.total)}</span></li>`)}
      <li><span class="swatch t-prefill" />Prompt tokens</li><li><span class="swatch t-decode" />Completion tokens</li><li><span class="swatch line" />Step time</li>
    </ul>`;
}

function StepTip({ step, at, series, left, width }) {
  const rows = series.filter((one) => one.values[at] > 0);
  const style = left > width / 2 ? { right: `${width - left + 10}px` } : { left: `${left + 10}px` };
  return html`<div class="tip" style=${style} role="status"><strong>Step ${count(step.step)}</strong>
    <table><tbody>
      ${rows.reverse().map((one) => html`<tr key=${one.key}><th><span class=${`swatch ${one.className}`} /> ${one.label}</th><td class="number">${one.values[at]}</td></tr>`)}
      <tr><th>Prompt tokens</th><td class="number">${count(step.prefill_tokens)}</td></tr><tr><th>Completion tokens</th><td class="number">${count(step.tokens - step.prefill_tokens)}</td></tr>
      <tr><th>Took</th><td class="number">${seconds(step.seconds)}</td></tr>
    </tbody></table></div>`;
}

const rect = (x, y, width, height) => (height > 0 ? `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z` : "");
