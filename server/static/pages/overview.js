// The overview: requests, tokens, errors and times of a range, with the largest adapters and tenants.
import { html } from "../lib.js";
import { useApi } from "../api.js";
import { change, compact, count, money, percent, seconds } from "../format.js";
import { Link, param } from "../place.js";
import { RangePicker, rangeShown, spanOf } from "../range.js";
import { isAdmin } from "../session.js";
import { Card, Code, Empty, FirstProblem, Loaded, PageHead, Stat, Table, numbers } from "../ui.js";
import { Legend, Lines, ShareBar, StackedBars } from "../charts.js";
import { DIMENSIONS, ERRORS, METRICS, chartOf, nameOf } from "../usage_rows.js";
import { DAY, bucketAt, bucketsBetween } from "../zone.js";
import { KINDS } from "./live/pool.js";

const COLOURS = 6;
const ROWS = 10;
const LIMIT = 10_000;

export default function Overview() {
  const range = rangeShown("24h");
  const asked = useAnswers(range);
  const { byStatus, chart } = asked;
  const pages = isAdmin() && html`<${DevicePages} engine=${asked.engine} />`;
  const about = range.isNow ? `Refreshes every ${freshS(range)} s.` : "This range is in the past, so its figures are final.";
  return html`<${PageHead} title="Overview" about=${about}><${RangePicker} /><//>
    <${FirstProblem} of=${Object.values(asked)} />
    <${Tiles} ...${asked} />
    ${byStatus.data?.totals.requests === 0
      ? html`<${Card}><${FirstSteps} /><//>${pages}`
      : html`<${TokensCard} chart=${chart} range=${range} />
        <div class="columns">
          <div class="stack"><${Top} of=${chart} by="adapter" rowsOf=${(rows) => foldedBy(rows, adapterIn)} cell=${adapterName} />${pages}</div>
          <div class="stack"><${FirstTokens} latency=${asked.latency} range=${range} />
            ${isAll() && html`<${Top} of=${byStatus} by="tenant" rowsOf=${(rows) => foldedBy(rows, (row) => row.tenant ?? "", ROWS)} cell=${tenantName} />`}</div>
        </div>`}`;
}

/** Months do not change by the second. */
const freshS = (range) => (range.end - range.start <= 3 * DAY ? 15 : 60);

/** Whether all tenants are shown. */
const isAll = () => isAdmin() && !param("tenant");

/** With more than one tenant an adapter's name does not tell which it is. */
const adapterGroups = () => (isAll() ? ["tenant", "adapter"] : ["adapter"]);

/**
 * All that the page asks: first what it shows, each question about months being work for the server, then what that is
 * compared with. What lies behind does not change, so it is asked once.
 */
function useAnswers(range) {
  const tenant = param("tenant");
  const now = { ...spanOf(range), tenant };
  const before = { ...spanOf(range.previous), tenant };
  const fresh = { everyS: range.isNow ? freshS(range) : undefined, about: range };
  const groups = adapterGroups().join();
  const byStatus = useApi("/v1/usage", { ...now, group_by: isAll() ? "tenant,status" : "status", limit: LIMIT }, { ...fresh, all: true });
  const chart = useApi("/v1/usage", { ...now, bucket: range.bucket, tz: range.zone, group_by: groups, top: ROWS }, fresh);
  const latency = useApi("/v1/usage/latency", { ...now, bucket: latencyBucket(range) }, fresh);
  const then = (path) => (byStatus.data && chart.data && latency.data ? path : null);
  return {
    byStatus,
    chart,
    latency,
    engine: useApi(isAdmin() ? "/v1/engine" : null, {}, { everyS: 15 }),
    base: useApi(then("/v1/usage"), { ...now, adapter: "", group_by: isAll() ? "tenant" : "", limit: LIMIT }, fresh),
    byStatusBefore: useApi(then("/v1/usage"), { ...before, group_by: "status" }),
    adaptersBefore: useApi(then("/v1/usage"), { ...before, group_by: groups, top: 1 }),
    baseBefore: useApi(then("/v1/usage"), { ...before, adapter: "", group_by: isAll() ? "tenant" : "", limit: LIMIT }),
    latencyBefore: useApi(then("/v1/usage/latency"), before),
  };
}

/** A percentile; null where nothing was measured, undefined until that is known. */
const timeOf = (times, name) => (times === undefined ? undefined : (times?.[name] ?? null));
const totalTokens = METRICS.total_tokens.of;
const sumOf = (answer, statuses) => answer.data.filter((row) => statuses.includes(row.status)).reduce((sum, row) => sum + row.requests, 0);
const errorShare = (answer) => answer && (answer.totals.requests ? sumOf(answer, ERRORS) / answer.totals.requests : null);
/** Groups of adapters, without the base of this or of each tenant. */
const activeOf = (adapters, base) => (adapters && base ? adapters.groups - (base.groups ?? (base.totals.requests ? 1 : 0)) : undefined);

function Tiles({ byStatus, byStatusBefore, chart, adaptersBefore, base, baseBefore, latency, latencyBefore }) {
  const [now, before] = [byStatus.data?.totals, byStatusBefore.data?.totals];
  const tile = (name) => ({ value: now ? html`<span data-exact=${now[name]}>${compact(now[name])}</span>` : "–", hint: now && count(now[name]), change: change(now?.[name], before?.[name]) });
  const [ttft, ttftBefore] = [latency.data?.totals.ttft_s, latencyBefore.data?.totals.ttft_s];
  const errors = errorShare(byStatus.data);
  const inUse = activeOf(chart.data, base.data);
  const currency = byStatus.data?.currency;
  return html`<section aria-label="Figures" class="tiles">
    <div class="stats">
      <${Stat} label="Requests" isGood=${true} ...${tile("requests")} />
      <${Stat} label="Prompt tokens" isGood=${true} ...${tile("prompt_tokens")} />
      <${Stat} label="Cached tokens" isGood=${true} ...${tile("cached_tokens")}>
        <p class="stat-note">${now?.prompt_tokens ? `${percent(now.cached_tokens / now.prompt_tokens)} of the prompt tokens` : now ? "no prompt tokens" : "\u00a0"}</p><//>
      <${Stat} label="Completion tokens" isGood=${true} ...${tile("completion_tokens")} />
    </div>
    <div class="stats">
      <${Stat} label="Errors" isGood=${false} value=${percent(errors)} change=${change(errors, errorShare(byStatusBefore.data))}
        hint="Share of requests that ended with error or interrupted">
        <p class="stat-note">${byStatus.data ? `${count(sumOf(byStatus.data, ERRORS))} of ${count(now.requests)}; ${count(sumOf(byStatus.data, ["aborted"]))} aborted by clients` : "–"}</p><//>
      ${["p50", "p95"].map((name) => html`<${Stat} key=${name} label=${`Time to first token, ${name}`} isGood=${false} change=${change(timeOf(ttft, name), timeOf(ttftBefore, name))}
        value=${html`<span data-exact=${ttft?.[name]}>${seconds(ttft?.[name])}</span>`} hint=${`${name.slice(1)} of 100 requests had their first token within this time`} />`)}
      <${Stat} label="Adapters in use" isGood=${true} value=${inUse === undefined ? "–" : count(inUse)} change=${change(inUse, activeOf(adaptersBefore.data, baseBefore.data))} hint=${`Adapters with a request in this range${isAll() ? "; one that several tenants call counts once for each tenant" : ""}`} />
      ${currency && html`<${Stat} label="Cost" value=${money(now.cost, currency)} hint=${`${now.cost} ${currency}`} change=${change(Number(now.cost), before && Number(before.cost))} />`}
    </div>
  </section>`;
}

/** The problem of any answer stands at the top of the page. */
const Waiting = (props) => html`<${Loaded} isQuiet lines=${3} ...${props} />`;

const TokensCard = ({ chart, range }) => html`<${Card} title="Tokens by adapter" note=${{ "1d": "per day", "1h": "per hour", "1m": "per minute" }[range.bucket]}
  actions=${html`<${Link} to="/usage" params=${{ range: range.name === "custom" ? null : range.name }}>Explore usage<//>`}>
  <${Waiting} of=${chart}>${(answer, about) => {
    const { buckets, series } = chartOf(answer, about, { groups: adapterGroups(), metric: "total_tokens", top: COLOURS });
    return html`<${StackedBars} buckets=${buckets} series=${series} label="Tokens by adapter" exact=${count} />
      <${Legend} series=${series} />`;
  }}<//>
<//>`;

/** An adapter's name, with a link to its page unless it is the base or another tenant's. */
function adapterName(row) {
  if (row.other) return html`<span class="quiet">Other</span>`;
  const [name, owner] = (row.adapter ?? "base model").split("/").reverse();
  const to = row.adapter && (isAdmin() || !owner) && `/adapters/${encodeURIComponent(name)}`;
  const params = isAdmin() ? { tenant: owner ?? row.tenant ?? param("tenant") } : {};
  return html`${to ? html`<${Link} to=${to} params=${params}>${row.adapter}<//>` : html`<span>${row.adapter ?? name}</span>`}${row.tenant && html` <span class="quiet">${row.tenant}</span>`}`;
}

const figure = (key, label) => ({ key, label, isNumber: true, cell: (row) => html`<span data-exact=${row[key]} title=${count(row[key])}>${compact(row[key])}</span>` });
const FIGURES = [figure("requests", "Requests"), figure("prompt_tokens", "Prompt"), figure("completion_tokens", "Completion")];

const shareOf = (row, totals) => (totalTokens(totals) ? totalTokens(row) / totalTokens(totals) : 0);

/** The columns behind the name: requests, tokens, cost where there are prices, and the share of all tokens. */
function figuresOf({ currency, totals }) {
  const bar = (row) => html`<span class="share"><span class="share-fill" style=${{ width: `${100 * shareOf(row, totals)}%` }} /></span> ${percent(shareOf(row, totals))}`;
  return [...FIGURES, ...(currency ? [numbers("cost", `Cost (${currency})`, money)] : []), { key: "share", label: "Share", isNumber: true, value: totalTokens, cell: bar }];
}

/** One row for each name that `nameIn` gives, with its sums, the most tokens first; all behind `most` of them are one row. */
function foldedBy(rows, nameIn, most = Infinity) {
  const found = new Map();
  for (const row of rows) {
    const name = nameIn(row);
    const sum = found.get(name) ?? { name, tenant: row.tenant, adapter: row.adapter, other: row.other === true, requests: 0, prompt_tokens: 0, completion_tokens: 0, cost: 0 };
    for (const figure of ["requests", "prompt_tokens", "completion_tokens"]) sum[figure] += row[figure];
    sum.cost += Number(row.cost ?? 0);
    found.set(name, sum);
  }
  const ordered = [...found.values()].sort((a, b) => a.other - b.other || totalTokens(b) - totalTokens(a));
  const rest = ordered.slice(most).map((row) => ({ ...row, other: true }));
  return [...ordered.slice(0, most), ...(rest.length ? foldedBy(rest, () => "other") : [])];
}

const adapterIn = (row) => (row.other ? "other" : JSON.stringify([row.tenant, row.adapter]));

/** The tenant's name, with a link to its page. */
const tenantName = (row) =>
  row.other || !row.tenant ? html`<span class="quiet">${nameOf(row, "tenant")}</span>` : html`<${Link} to=${`/tenants/${encodeURIComponent(row.tenant)}`}>${row.tenant}<//>`;

/** The rows with most tokens of a dimension, and a link to all. `rowsOf` makes them of the answer, `cell` their names. */
const Top = ({ of: asked, by, rowsOf, cell }) => html`<${Card} title=${`Top ${by}s`} actions=${html`<${Link} to="/usage" params=${{ group: by }}>All ${by}s<//>`}>
  <${Waiting} of=${asked}>${(answer) => html`<${Table} caption=${`Top ${by}s`} rows=${rowsOf(answer.data)} keyOf=${(row) => row.name}
    columns=${[{ key: by, label: DIMENSIONS[by], value: (row) => (row.other ? null : nameOf(row, by)), cell }, ...figuresOf(answer)]} />`}<//>
<//>`;

/** The server counts times by hours and by days of UTC. */
const latencyBucket = (range) => (range.end - range.start <= 8 * DAY ? "1h" : "1d");

function FirstTokens({ latency, range }) {
  return html`<${Card} title="Time to first token" note=${latencyBucket(range) === "1h" ? "per hour" : "per day (UTC)"}>
    <${Waiting} of=${latency}>${(answer, about) => {
      const bucket = latencyBucket(about);
      const at = new Map(answer.data.map((row) => [Date.parse(row.start), row.ttft_s]));
      if (![...at.values()].some(Boolean)) return html`<${Empty} title="No request had a first token in this range." />`;
      const zone = bucket === "1d" ? "UTC" : about.zone;
      const starts = bucketsBetween("UTC", Date.parse(answer.start), Date.parse(answer.end), bucket);
      const points = starts.map((start) => bucketAt(zone, start, bucket));
      const line = (name) => ({ key: name, label: name, values: starts.map((start) => at.get(start)?.[name] ?? null) });
      const series = [line("p50"), line("p95")];
      const { p50, p95 } = answer.totals.ttft_s;
      return html`<${Lines} points=${points} series=${series} format=${seconds} label="Time to first token" said=${`Time to first token: p50 ${seconds(p50)}, p95 ${seconds(p95)}`} />
        <${Legend} series=${series} />`;
    }}<//>
  <//>`;
}

const DevicePages = ({ engine }) => html`<${Card} title="Device pages" note="now" actions=${html`<${Link} to="/live">Details<//>`}>
  <${Waiting} of=${engine}>${(status) => html`<${ShareBar} label="Device pages" parts=${Object.entries(KINDS).map(([key, { label, colour }]) => ({ key, label, colour, value: status.pages[key] ?? 0 }))} />
    <p class="quiet pages-note">${count(status.running)} running, ${count(status.waiting)} waiting · ${count(status.residents.filter((one) => one.tier === "device").length)} adapters on the device</p>`}<//>
<//>`;

const FirstSteps = () => html`<${Empty} title="No requests in this range.">
  <div class="first-steps">
    <p>Choose a longer range above, or upload an adapter on the page <${Link} to="/adapters">Adapters<//> or with</p>
    <${Code} text=${`manylora adapter push ./my-adapter${isAdmin() ? ` --tenant ${param("tenant") ?? "NAME"}` : ""}`} label="Upload an adapter" />
    <p>and ask it something in the <${Link} to="/playground">Playground<//>. For an example with traffic, run <code>manylora demo</code>: it serves a small model and replays a minute of requests.</p>
  </div>
<//>`;
