// Requests in the engine by tenant: running, waiting and why.
import { html } from "../../lib.js";
import { count, percent, seconds } from "../../format.js";
import { Link } from "../../place.js";
import { Card, Empty, Table } from "../../ui.js";

const REASONS = { LOADING: "loading", NO_ROOM: "no room", NO_PAGES: "no pages", FORK: "shared prompt", NEW: "in line" };
/** Why requests were refused; other codes are shown as they are. */
const REFUSALS = { "limit.queue": "over share", "server.overloaded": "overload", engine_overloaded: "queue full", "deadline.queue": "too late" };

const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

/** Counts with plain words, the `most` largest and the sum of the others. */
function inWords(counts, words, most = Infinity) {
  const sorted = Object.entries(counts).filter(([, number]) => number > 0).sort(([, a], [, b]) => b - a);
  const rest = sum(sorted.slice(most), ([, number]) => number);
  const texts = sorted.slice(0, most).map(([code, number]) => `${count(number)} ${words[code] ?? code}`);
  return [...texts, ...(rest ? [`${count(rest)} others`] : [])].map((text) => text.replaceAll(" ", "\u00a0")).join(", ");
}

/** Why requests wait: "3 in line, 1 loading". */
export const reasonsText = (reasons, most) => inWords(reasons, REASONS, most);

const sumCounts = (all) => all.flatMap(Object.entries).reduce((sums, [key, number]) => ({ ...sums, [key]: (sums[key] ?? 0) + number }), {});

/** One row for each tenant, the most served first: those of the snapshot, those just before, and those with refusals. */
function rowsOf({ tenants, admission, lately }) {
  const refusedOnes = Object.keys(admission).filter((name) => Object.keys(admission[name].refused).length);
  const names = [...new Set([...Object.keys(tenants), ...refusedOnes, ...lately])];
  const loads = Object.values(tenants);
  const [weights, rates] = [sum(loads, (load) => load.weight), sum(loads, (load) => load.rate)];
  return names
    .map((name) => {
      const { weight = null, rate = 0, running = 0, paused = 0, waiting = 0, reasons = {} } = tenants[name] ?? {};
      const { wait_s: wait = null, refused = {} } = admission[name] ?? {};
      return { name, weight, due: weight === null ? null : weight / weights, share: rates ? rate / rates : null, inStep: running - paused, paused, waiting, reasons, wait, refused };
    })
    .sort((a, b) => b.share - a.share || b.inStep - a.inStep || b.waiting - a.waiting || (a.name < b.name ? -1 : 1));
}

/** Many rows as one. */
const others = (rows) => ({
  name: `${count(rows.length)} others`, isMany: true, weight: sum(rows, (row) => row.weight), due: sum(rows, (row) => row.due),
  share: rows[0].share === null ? null : sum(rows, (row) => row.share), inStep: sum(rows, (row) => row.inStep), paused: sum(rows, (row) => row.paused),
  waiting: sum(rows, (row) => row.waiting), reasons: sumCounts(rows.map((row) => row.reasons)), wait: rows.some((row) => row.wait !== null) ? Math.max(...rows.map((row) => row.wait)) : null,
  refused: sumCounts(rows.map((row) => row.refused)),
});

/** A row's share of the service, with a mark at the share that its weight gives; `whole` fills the bar. */
function Share({ of: { share, due, isMany }, whole }) {
  const width = (part) => Math.min(100, (100 * part) / whole);
  return html`<span class="bar-cell">${!isMany && html`<svg class="bar-track" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
    <rect class="s0" width=${width(share)} height="8" rx="1" />${due !== null && html`<rect class="due" x=${width(due) - 2} width="2" height="8" />`}</svg>`}
    <span class="served" data-figure="share">${percent(share)}</span></span>`;
}

function Name({ of: { name, isMany } }) {
  if (isMany) return name;
  return name === "(admin)" ? "admin" : html`<${Link} to=${`/tenants/${encodeURIComponent(name)}`}>${name}<//>`;
}

const wait = (value) => (value !== null && value < 0.05 ? "none" : seconds(value));

export function Tenants({ snapshot }) {
  const rows = rowsOf(snapshot);
  const whole = Math.max(1e-9, ...rows.map((row) => Math.max(row.share, row.due)));
  const figure = (key, label) => ({ key, label, isNumber: true, cell: (row) => count(row[key]) });
  const columns = [
    { key: "name", label: "Tenant", cell: (row) => html`<${Name} of=${row} />` },
    { key: "weight", label: "Weight", isNumber: true, cell: (row) => (row.weight === null ? "–" : html`${count(row.weight)} <span class="quiet">${percent(row.due)}</span>`) },
    { key: "share", label: "Served lately", isNumber: true, cell: (row) => html`<${Share} of=${row} whole=${whole} />` },
    figure("inStep", "In step"), figure("paused", "Paused"), figure("waiting", "Waiting"),
    { key: "reasons", label: "Why", isFixed: true, cell: (row) => reasonsText(row.reasons) },
    { key: "wait", label: "Predicted wait", isNumber: true, cell: (row) => wait(row.wait) },
    { key: "refused", label: "Refused", isNumber: true, value: (row) => sum(Object.values(row.refused), (number) => number), cell: (row) => inWords(row.refused, REFUSALS) || "none" },
  ];
  return html`<${Card} title="Tenants" note="running and waiting requests, and why they wait">
    ${rows.length
      ? html`<${Table} caption="Tenants in the engine" columns=${columns} rows=${rows} keyOf=${(row) => row.name} others=${others} sort="-share" first=${10} />
          <${Words} />`
      : html`<${Empty} title="No tenant has a request in the engine.">Tenants with requests are shown here with their share and why their requests wait.<//>`}
  <//>`;
}

const Words = () => html`<details class="as-table"><summary>What the columns say</summary>
  <dl class="facts">
    <dt>Weight</dt><dd>The tenant's weight, and its share of the engine among the tenants with requests now. The mark in the bar shows that share.</dd>
    <dt>Served lately</dt><dd>The tenant's share of the work of the last seconds.</dd>
    <dt>Paused</dt><dd>Requests that hold memory pages but were left out of the last step.</dd>
    <dt>Why</dt><dd>In line: other requests are first. Loading: the adapter is being loaded. No room: no pages or slot free for the adapter. No pages: no pages free for KV cache. Shared prompt: the first of several choices computes the prompt.</dd>
    <dt>Predicted wait</dt><dd>How long a new request would wait for its first step; in the row of many tenants, the longest.</dd>
    <dt>Refused</dt><dd>Over share: status 429, the tenant uses more than its share. Overload, queue full and too late: status 503, because the server cannot start the request in time, the queue is full, or the request waited longer than its deadline. The counts are cleared ten minutes after the tenant's last request.</dd>
  </dl>
</details>`;
