// What happened lately: how much, how well, by whom.
import { html } from "../lib.js";
import { useApi } from "../api.js";
import { change, compact, count, money, percent, seconds } from "../format.js";
import { Link, param } from "../place.js";
import { RangePicker, rangeShown, spanOf } from "../range.js";
import { isAdmin, may } from "../session.js";
import { Card, Code, Empty, Problem, Stat, Table } from "../ui.js";
import { Legend, StackedBars } from "../charts/stacked_bars.js";
import { Lines } from "../charts/lines.js";
import { ShareBar } from "../charts/share_bar.js";
import { BASE, ERRORS, METRICS, chartOf, fullFormat, nameOf, shortFormat } from "../usage_rows.js";
import { DAY, bucketLabel, bucketTitle, bucketsBetween } from "../zone.js";

export const title = "Overview";

const FRESH_S = 15;
const TOP = 6;
const ROWS = 10;

/** The page. */
export default function Overview() {
  if (!may("usage")) {
    return html`<h1>Overview</h1>
      <${Card}><${Empty} title="This key does not show usage.">It lacks the scope <code>usage</code>. Sign in with a key that has it, or ask whoever gave you this one.<//><//>`;
  }
  return html`<${Shown} />`;
}

function Shown() {
  const range = rangeShown("24h");
  const asked = useAnswers(range);
  const failed = Object.values(asked).find((answer) => answer.error);
  const retry = () => Object.values(asked).forEach((answer) => answer.reload());
  const { byStatus, chart } = asked;
  const isEmpty = byStatus.data?.totals.requests === 0;
  return html`
    <div class="page-head">
      <div><h1>Overview</h1><p class="quiet">${range.isNow ? `Asked anew every ${FRESH_S} seconds.` : "A time that is over."}</p></div>
      <${RangePicker} />
    </div>
    ${failed && html`<${Problem} error=${failed.error} retry=${retry} />`}
    <${Tiles} ...${asked} />
    ${isEmpty
      ? html`<${Card}><${FirstSteps} /><//>`
      : html`<${TokensCard} chart=${chart} range=${range} />
        <div class="columns">
          <div class="stack"><${TopAdapters} top=${asked.adapters} />${isAdmin() && html`<${DevicePages} engine=${asked.engine} />`}</div>
          <div class="stack"><${FirstTokens} latency=${asked.latency} range=${range} />${isAll() && html`<${TopTenants} top=${asked.tenants} />`}</div>
        </div>`}
    ${isEmpty && isAdmin() && html`<${DevicePages} engine=${asked.engine} />`}`;
}

/** Whether all tenants are shown. */
const isAll = () => isAdmin() && !param("tenant");

/** With more than one tenant an adapter's name does not tell which it is. */
const adapterGroups = () => (isAll() ? ["tenant", "adapter"] : ["adapter"]);

/** All that the page asks, at once; what lies behind does not change, so it is asked once. */
function useAnswers(range) {
  const tenant = param("tenant");
  const now = { ...spanOf(range), tenant };
  const before = { ...spanOf(range.previous), tenant };
  const fresh = { everyS: range.isNow ? FRESH_S : undefined, about: range };
  const ranked = { rank_by: "total_tokens" };
  const group_by = adapterGroups().join();
  return {
    byStatus: useApi("/v1/usage", { ...now, group_by: "status" }, fresh),
    byStatusBefore: useApi("/v1/usage", { ...before, group_by: "status" }),
    active: useApi("/v1/usage", { ...now, group_by: "adapter", top: 1 }, fresh),
    activeBefore: useApi("/v1/usage", { ...before, group_by: "adapter", top: 1 }),
    base: useApi("/v1/usage", { ...now, adapter: "" }, fresh),
    baseBefore: useApi("/v1/usage", { ...before, adapter: "" }),
    latency: useApi("/v1/usage/latency", { ...now, bucket: latencyBucket(range) }, fresh),
    latencyBefore: useApi("/v1/usage/latency", before),
    chart: useApi("/v1/usage", { ...now, bucket: range.bucket, tz: range.zone, group_by, top: TOP, ...ranked }, fresh),
    adapters: useApi("/v1/usage", { ...now, group_by, top: ROWS, ...ranked }, fresh),
    tenants: useApi(isAll() ? "/v1/usage" : null, { ...now, group_by: "tenant", top: ROWS, ...ranked }, fresh),
    engine: useApi(isAdmin() ? "/v1/engine" : null, {}, fresh),
  };
}

const totalTokens = METRICS.total_tokens.of;
const sumOf = (answer, statuses) => answer.data.filter((row) => statuses.includes(row.status)).reduce((sum, row) => sum + row.requests, 0);
const errorShare = (answer) => (answer?.totals.requests ? sumOf(answer, ERRORS) / answer.totals.requests : null);
const activeOf = (groups, base) => (groups && base ? groups.groups - (base.totals.requests ? 1 : 0) : null);

function Tiles({ byStatus, byStatusBefore, active, activeBefore, base, baseBefore, latency, latencyBefore }) {
  const [now, before] = [byStatus.data?.totals, byStatusBefore.data?.totals];
  const tile = (name) => ({ value: now ? html`<span data-exact=${now[name]}>${compact(now[name])}</span>` : "–", hint: now && count(now[name]), change: change(now?.[name], before?.[name]) });
  const aborted = byStatus.data && sumOf(byStatus.data, ["aborted"]);
  const [ttft, ttftBefore] = [latency.data?.totals.ttft_s, latencyBefore.data?.totals.ttft_s];
  const errors = errorShare(byStatus.data);
  const inUse = activeOf(active.data, base.data);
  const currency = byStatus.data?.currency;
  return html`<section aria-label="Figures" class="tiles">
    <div class="stats">
      <${Stat} label="Requests" isGood=${true} ...${tile("requests")} />
      <${Stat} label="Tokens in" isGood=${true} ...${tile("prompt_tokens")} />
      <${Stat} label="Cached tokens" isGood=${true} ...${tile("cached_tokens")}>
        <p class="stat-note">${now?.prompt_tokens ? `${percent(now.cached_tokens / now.prompt_tokens)} of the tokens in` : "no tokens in yet"}</p><//>
      <${Stat} label="Tokens out" isGood=${true} ...${tile("completion_tokens")} />
    </div>
    <div class="stats">
      <${Stat} label="Errors" isGood=${false} value=${percent(errors)} change=${change(errors, errorShare(byStatusBefore.data))}
        hint="Requests that ended with error or interrupted, of all">
        <p class="stat-note">${byStatus.data ? `${count(sumOf(byStatus.data, ERRORS))} of ${count(now.requests)}; ${count(aborted)} aborted by their clients` : "–"}</p><//>
      ${["p50", "p95"].map((name) => html`<${Stat} key=${name} label=${`Time to first token, ${name}`} isGood=${false} change=${change(ttft?.[name], ttftBefore?.[name])}
        value=${html`<span data-exact=${ttft?.[name]}>${seconds(ttft?.[name])}</span>`} hint=${`${name.slice(1)} of 100 requests had their first token within this time`} />`)}
      <${Stat} label="Adapters in use" isGood=${true} value=${inUse === null ? "–" : count(inUse)} change=${change(inUse, activeOf(activeBefore.data, baseBefore.data))} hint="Adapters with a request in this time" />
      ${currency && html`<${Stat} label="Cost" value=${money(now.cost, currency)} hint=${`${now.cost} ${currency}`} change=${change(Number(now.cost), before && Number(before.cost))} />`}
    </div>
  </section>`;
}

function Waiting({ of: answer, children }) {
  if (answer.data !== undefined) return html`<div aria-busy=${answer.isLoading}>${children(answer.data, answer.about)}</div>`;
  if (answer.error) return html`<p class="quiet">Nothing to show until this is mended.</p>`;
  return html`<div class="skeleton" aria-busy="true" aria-label="Loading"><span /><span /><span /></div>`;
}

function TokensCard({ chart, range }) {
  const actions = html`<${Link} to="/usage" params=${{ range: range.name === "custom" ? null : range.name }}>Explore usage<//>`;
  return html`<${Card} title="Tokens by adapter" note=${range.bucket === "1d" ? "per day" : range.bucket === "1h" ? "per hour" : "per minute"} actions=${actions}>
    <${Waiting} of=${chart}>${(answer, about) => {
      const { buckets, series } = chartOf(answer, about, { groups: adapterGroups(), metric: "total_tokens", top: TOP });
      return html`<${StackedBars} buckets=${buckets} series=${series} label="Tokens by adapter" format=${shortFormat("total_tokens")} exact=${fullFormat("total_tokens")} />
        <${Legend} series=${series} />`;
    }}<//>
  <//>`;
}

/** Where an adapter's page is; null for the base and for those of others. */
function adapterPlace(row) {
  if (!row.adapter) return null;
  const [owner, name] = row.adapter.includes("/") ? row.adapter.split("/") : [null, row.adapter];
  if (owner && !isAdmin()) return null;
  return { to: `/adapters/${encodeURIComponent(name)}`, params: isAdmin() ? { tenant: owner ?? row.tenant ?? param("tenant") } : {} };
}

function AdapterName({ row }) {
  if (row.other) return html`<span class="quiet">Other</span>`;
  const place = adapterPlace(row);
  const name = row.adapter ?? "base model";
  return html`${place ? html`<${Link} ...${place}>${name}<//>` : html`<span>${name}</span>`}${row.tenant && html` <span class="quiet">${row.tenant}</span>`}`;
}

const FIGURES = [
  { key: "requests", label: "Requests", isNumber: true, cell: (row) => count(row.requests) },
  { key: "prompt_tokens", label: "In", isNumber: true, cell: (row) => count(row.prompt_tokens) },
  { key: "completion_tokens", label: "Out", isNumber: true, cell: (row) => count(row.completion_tokens) },
];

function figuresOf(answer) {
  if (!answer.currency) return FIGURES;
  return [...FIGURES, { key: "cost", label: `Cost (${answer.currency})`, isNumber: true, value: (row) => Number(row.cost), cell: (row) => html`<span title=${row.cost}>${money(row.cost)}</span>` }];
}

const shareOf = (row, totals) => (totalTokens(totals) ? totalTokens(row) / totalTokens(totals) : 0);

const shareColumn = (totals) => ({
  key: "share",
  label: "Share",
  isNumber: true,
  value: totalTokens,
  cell: (row) => html`<span class="share"><span class="share-fill" style=${{ width: `${100 * shareOf(row, totals)}%` }} /></span> ${percent(shareOf(row, totals))}`,
});

/** Rows of the top, and one for all others. */
const named = (rows) => rows.map((row, place) => ({ ...row, place }));

function TopAdapters({ top }) {
  const tenant = param("tenant");
  return html`<${Card} title="Top adapters" actions=${html`<${Link} to="/usage" params=${{ group: "adapter" }}>All of them<//>`}>
    <${Waiting} of=${top}>${(answer) => html`<${Table} caption="Top adapters" rows=${named(answer.data)} keyOf=${(row) => (row.other ? "other" : [row.tenant ?? tenant, row.adapter ?? BASE, row.place].join("/"))}
      columns=${[{ key: "adapter", label: "Adapter", value: (row) => (row.other ? null : row.adapter ?? "base model"), cell: (row) => html`<${AdapterName} row=${row} />` }, ...figuresOf(answer), shareColumn(answer.totals)]} />`}<//>
  <//>`;
}

function TopTenants({ top }) {
  const name = (row) => (row.other || !row.tenant ? html`<span class="quiet">${nameOf(row, "tenant")}</span>` : html`<${Link} to=${`/tenants/${encodeURIComponent(row.tenant)}`}>${row.tenant}<//>`);
  return html`<${Card} title="Top tenants" actions=${html`<${Link} to="/usage" params=${{ group: "tenant" }}>All of them<//>`}>
    <${Waiting} of=${top}>${(answer) => html`<${Table} caption="Top tenants" rows=${named(answer.data)} keyOf=${(row) => (row.other ? "other" : row.tenant ?? "")}
      columns=${[{ key: "tenant", label: "Tenant", cell: name }, ...figuresOf(answer), shareColumn(answer.totals)]} />`}<//>
  <//>`;
}

/** The server counts times by hours and by days of UTC. */
const latencyBucket = (range) => (range.end - range.start <= 8 * DAY ? "1h" : "1d");

function FirstTokens({ latency, range }) {
  return html`<${Card} title="Time to first token" note=${latencyBucket(range) === "1h" ? "by the hour" : "by days of UTC"}>
    <${Waiting} of=${latency}>${(answer, about) => {
      const bucket = latencyBucket(about);
      const at = new Map(answer.data.map((row) => [Date.parse(row.start), row.ttft_s]));
      if (![...at.values()].some(Boolean)) return html`<${Empty} title="No request had a first token in this time." />`;
      const zone = bucket === "1d" ? "UTC" : about.zone;
      const starts = bucketsBetween("UTC", Date.parse(answer.start), Date.parse(answer.end), bucket);
      const points = starts.map((start) => ({ at: start, label: bucketLabel(zone, start, bucket), title: bucketTitle(zone, start, bucket) }));
      const line = (name) => ({ key: name, label: name, values: starts.map((start) => at.get(start)?.[name] ?? null) });
      const series = [line("p50"), line("p95")];
      const { p50, p95 } = answer.totals.ttft_s;
      return html`<${Lines} points=${points} series=${series} format=${seconds} label="Time to first token" said=${`Time to first token: p50 ${seconds(p50)}, p95 ${seconds(p95)}`} />
        <${Legend} series=${series} />`;
    }}<//>
  <//>`;
}

const KINDS = [
  { key: "kv", label: "KV cache", colour: "s0" },
  { key: "prefix", label: "Cached prefixes", colour: "s6" },
  { key: "adapter", label: "Adapters", colour: "s1" },
  { key: "quarantine", label: "In quarantine", colour: "s3" },
  { key: "free", label: "Free", colour: "s-free" },
];

function DevicePages({ engine }) {
  return html`<${Card} title="Device pages" note="now" actions=${html`<${Link} to="/live">Look inside<//>`}>
    <${Waiting} of=${engine}>${(status) => html`<${ShareBar} label="Device pages" parts=${KINDS.map((kind) => ({ ...kind, value: status.pages[kind.key] ?? 0 }))} />
      <p class="quiet pages-note">${count(status.running)} running, ${count(status.waiting)} waiting · ${count(status.residents.filter((one) => one.tier === "device").length)} adapters on the device</p>`}<//>
  <//>`;
}

function FirstSteps() {
  return html`<${Empty} title="No requests in this time.">
    <div class="first-steps">
      <p>Choose a longer range above, or begin: upload an adapter on the page <${Link} to="/adapters">Adapters<//> or from a folder,</p>
      <${Code} text="weft adapter push ./my-adapter" label="Upload an adapter" />
      <p>and ask it something in the <${Link} to="/playground">Playground<//>. To see all of this at work first, <code>weft demo</code> serves a small model and replays a minute of traffic.</p>
    </div>
  <//>`;
}
