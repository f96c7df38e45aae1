// The usage explorer: any query of usage as bars, table and file. The address holds the query.
import { html } from "../lib.js";
import { useApi, useSending } from "../api.js";
import { count, digitsOf, exactMoney, time } from "../format.js";
import { param, paramAll, place, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf } from "../range.js";
import { isAdmin, may } from "../session.js";
import { Button, Card, Copy, Empty, LacksScope, Loaded, Problem, Segmented, Select, Table, say } from "../ui.js";
import { Legend } from "../charts/frame.js";
import { StackedBars } from "../charts/stacked_bars.js";
import { Filter } from "../filters.js";
import { csvOf, fileName, jsonOf, saveFile } from "../download.js";
import { BASE, DIMENSIONS, METRICS, chartOf, fullFormat, keyName, nameOf, shortFormat } from "../usage_rows.js";
import { filtersShown, questionShown, useKeys, useOptionsOf } from "../usage_question.js";

export const title = "Usage";

const DEFAULT_RANGE = "30d";
const LIMIT = 10_000;

/** The page. */
export default function Usage() {
  return may("usage") ? html`<${Explorer} />` : html`<h1>Usage</h1><${LacksScope} scope="usage" title="This key may not see usage." />`;
}

function Explorer() {
  const range = rangeShown(DEFAULT_RANGE);
  const question = questionShown();
  const { groups, metric, top, filters, isPerBucket } = question;
  const asked = { ...spanOf(range), ...filters, group_by: groups.join() };
  const about = { ...question, range };
  const ranking = groups.length ? { top, rank_by: METRICS[metric].rankBy } : {};
  const chart = useApi("/v1/usage", { ...asked, bucket: range.bucket, tz: range.zone, limit: LIMIT, ...ranking }, { about });
  const rowsAsked = isPerBucket ? { ...asked, bucket: range.bucket, tz: range.zone } : asked;
  const table = useApi("/v1/usage", { ...rowsAsked, limit: LIMIT }, { all: true, about });
  const keys = useKeys(range, filters, groups.includes("key") || paramAll("key").length > 0);
  const failed = [table, chart].find((answer) => answer.error);
  const retry = () => [table, chart].forEach((answer) => answer.reload());
  const currency = table.data?.currency ?? chart.data?.currency;
  return html`
    <div class="page-head">
      <div><h1>Usage</h1><p class="quiet">Exact usage by tenant, adapter, version, key and status.</p></div>
      <${RangePicker} otherwise=${DEFAULT_RANGE} withBucket=${true} />
    </div>
    <${Filters} range=${range} keys=${keys} />
    ${failed && html`<${Problem} error=${failed.error} retry=${retry} />`}
    <${ChartCard} chart=${chart} question=${question} keys=${keys} currency=${currency} />
    <${TableCard} table=${table} asked=${rowsAsked} range=${range} filters=${filters} isPerBucket=${isPerBucket} keys=${keys} />`;
}

function Filters({ range, keys }) {
  const { tenant: _, ...chosen } = filtersShown();
  const isAny = Object.values(chosen).some((values) => values.length) || (isAdmin() && param("tenant"));
  const dimensions = Object.keys(DIMENSIONS).filter((dimension) => dimension !== "tenant" || isAdmin());
  const named = { adapter: (value) => nameOf({ adapter: value === BASE ? null : value }, "adapter"), key: (value) => keyName(value, keys) };
  return html`<div class="filters" role="group" aria-label="Filters">
    ${dimensions.map((dimension) => html`<${Filter} key=${dimension} label=${DIMENSIONS[dimension]} isSingle=${dimension === "tenant"} nameOf=${named[dimension]}
      chosen=${paramAll(dimension)} onChange=${(values) => setParams({ [dimension]: values })} useOptions=${() => useOptionsOf(dimension, range)} />`)}
    ${isAny && html`<${Button} kind="small" onClick=${() => setParams(Object.fromEntries(dimensions.map((dimension) => [dimension, null])))}>Clear all<//>`}
  </div>`;
}

function ChartCard({ chart, question, keys, currency }) {
  const { metric, groups, top } = question;
  const groupChoices = Object.entries(DIMENSIONS).filter(([name]) => name !== "tenant" || isAdmin()).map(([value, label]) => ({ value, label }));
  const metrics = Object.entries(METRICS).filter(([name]) => name !== "cost" || currency || metric === "cost").map(([value, { label }]) => ({ value, label }));
  const none = { value: "none", label: "Nothing" };
  const actions = html`<div class="chart-choices">
    <${Select} label="Show" value=${metric} options=${metrics} onChange=${(value) => setParams({ metric: value, sort: null })} />
    <${Select} label="Group by" value=${question.group ?? "none"} options=${[...groupChoices, none]} onChange=${(value) => setParams({ group: value, subgroup: null, sort: null })} />
    ${question.group && html`<${Select} label="Then by" value=${question.subgroup ?? "none"} options=${[none, ...groupChoices.filter(({ value }) => value !== question.group)]} onChange=${(value) => setParams({ subgroup: value, sort: null })} />`}
    ${question.group && html`<${Segmented} label="Groups with a colour" value=${String(top)} options=${["5", "8", "12"].map((value) => ({ value, label: `Top ${value}` }))} onChange=${(value) => setParams({ top: value })} />`}</div>`;
  return html`<${Card} title=${titleOf(metric, groups)} actions=${actions}>
    <${Loaded} of=${chart} isQuiet lines=${3}>${(answer, about) => html`<${Chart} answer=${answer} about=${about} keys=${keys} />`}<//>
  <//>`;
}

const lower = (dimension) => DIMENSIONS[dimension].toLowerCase();
const listed = new Intl.ListFormat("en-GB", { type: "conjunction" });
const titleOf = (metric, groups) => `${METRICS[metric].label}${groups.length ? ` by ${listed.format(groups.map(lower))}` : ""}`;

function Chart({ answer, about, keys }) {
  const { metric, groups, top, range } = about;
  if (!answer.totals.requests) return html`<${Nothing} />`;
  const { buckets, series } = chartOf(answer, range, { groups, metric, top, keys });
  const [short, exact] = [shortFormat(metric, answer.currency), fullFormat(metric, answer.currency)];
  return html`<${StackedBars} buckets=${buckets} series=${series} label=${titleOf(metric, groups)} format=${short} exact=${exact} />
    <${Legend} series=${series} format=${exact} />
    ${metric === "cached_tokens" && groups.length > 0 && html`<p class="quiet">Groups are ranked by prompt tokens; cached tokens are a part of them.</p>`}`;
}

function Nothing() {
  const isFiltered = Object.entries(filtersShown()).some(([name, values]) => name !== "tenant" && values.length);
  if (isFiltered) return html`<${Empty} title="No usage matches these filters in this range."><${Button} onClick=${() => setParams({ adapter: null, version: null, key: null, status: null })}>Clear the filters<//><//>`;
  return html`<${Empty} title="No usage in this range.">Choose a longer range, or send a request: it is shown here as soon as it ends. <code>weft usage</code> shows the same on the command line.<//>`;
}

const FIGURES = { requests: "Requests", prompt_tokens: "Prompt", cached_tokens: "Cached", completion_tokens: "Completion" };

function columnsOf(answer, { groups, isPerBucket, range }, keys) {
  const dimensions = [...new Set(groups.flatMap((group) => (group === "version" ? ["adapter", "version"] : [group])))];
  const when = { key: "start", label: range.bucket === "1d" ? "Day" : range.bucket === "1h" ? "Hour" : "Minute", cell: (row) => time(row.start, range.zone).slice(0, range.bucket === "1d" ? 10 : 16) };
  const text = (dimension) => (row) => (dimension === "version" ? row.version ?? "–" : nameOf(row, dimension, keys));
  const digits = digitsShown(answer);
  const tokens = (row) => row.prompt_tokens + row.completion_tokens;
  return [
    ...(isPerBucket ? [when] : []),
    ...dimensions.map((dimension) => ({ key: dimension, label: DIMENSIONS[dimension], isNumber: dimension === "version", value: dimension === "version" ? (row) => row.version : text(dimension), cell: text(dimension) })),
    ...Object.entries(FIGURES).map(([key, label]) => ({ key, label, isNumber: true, cell: (row) => count(row[key]) })),
    { key: "total_tokens", label: "Total tokens", isNumber: true, value: tokens, cell: (row) => count(tokens(row)) },
    ...(answer.currency ? [{ key: "cost", label: `Cost (${answer.currency})`, isNumber: true, value: (row) => Number(row.cost), cell: (row) => exactMoney(row.cost, digits) }] : []),
  ];
}

/** Costs are shown with all their digits, because they must add up; all with as many as the longest. */
const digitsShown = ({ data, totals, currency }) => (currency ? Math.max(2, digitsOf(totals.cost), ...data.map((row) => digitsOf(row.cost))) : 2);

/** The API's own totals; they are not summed up here. */
function totalsOf(answer) {
  const { totals, currency } = answer;
  const figures = Object.fromEntries(Object.keys(FIGURES).map((key) => [key, count(totals[key])]));
  return { ...figures, total_tokens: count(totals.prompt_tokens + totals.completion_tokens), ...(currency ? { cost: exactMoney(totals.cost, digitsShown(answer)) } : {}) };
}

function TableCard({ table, asked, range, filters, isPerBucket, keys }) {
  const rows = html`<${Segmented} label="One row for" value=${isPerBucket ? "bucket" : "range"} onChange=${(value) => setParams({ rows: value === "range" ? null : value, sort: null })}
    options=${[{ value: "range", label: "Whole range" }, { value: "bucket", label: { "1m": "Each minute", "1h": "Each hour", "1d": "Each day" }[range.bucket] }]} />`;
  return html`<${Card} title="All groups" actions=${rows}>
    <${Loaded} of=${table} isQuiet lines=${3}>${(answer, about) => html`<${Sums} answer=${answer} about=${about} keys=${keys} />`}<//>
    <div class="table-foot">
      <p class="quiet">${table.at && html`Totals as of ${time(new Date(table.at).toISOString(), range.zone, { withSeconds: true })} (${range.zone.replaceAll("_", " ")}). Requests that end later are added.`}</p>
      <${Exports} asked=${asked} range=${range} filters=${filters} />
    </div>
  <//>`;
}

function Sums({ answer, about, keys }) {
  if (!answer.data.length) return html`<${Nothing} />`;
  const columns = columnsOf(answer, about, keys);
  const isOnlyTotal = !about.groups.length && !about.isPerBucket;
  const rows = isOnlyTotal ? [] : answer.data.map((row, place) => ({ ...row, place }));
  const sort = columns.some((column) => column.key === param("sort")?.replace(/^-/, "")) ? param("sort") : about.isPerBucket ? "start" : `-${about.metric}`;
  return html`<${Table} caption="Usage by group" columns=${isOnlyTotal ? [{ key: "all", label: "", isFixed: true }, ...columns] : columns} rows=${rows} keyOf=${(row) => row.place}
    totals=${totalsOf(answer)} sort=${sort} onSort=${(next) => setParams({ sort: next }, { replace: true })} />`;
}

function Exports({ asked, range, filters }) {
  const { error, send } = useSending();
  const save = (kind, extension, type, fetchParts) => () => send(async () => {
    const name = fileName(kind, range, extension);
    saveFile(name, await fetchParts(), type);
    say(`Saved ${name}`);
  });
  // With the zone: the reader of the link may be in another one.
  const here = new URL(location.pathname, location.origin);
  here.search = new URLSearchParams([...place.value.params].filter(([name]) => name !== "tz").concat([["tz", range.zone]]));
  return html`<div class="actions">
      <${Button} kind="small" onClick=${save("usage", "csv", "text/csv;charset=utf-8", () => csvOf("/v1/usage", asked))}>CSV<//>
      <${Button} kind="small" onClick=${save("usage", "json", "application/json", () => jsonOf("/v1/usage", asked))}>JSON<//>
      <${Button} kind="small" onClick=${save("usage-events", "csv", "text/csv;charset=utf-8", () => csvOf("/v1/usage/events", { ...spanOf(range), ...filters }))}>Events as CSV<//>
      <${Copy} text=${here.href} label="Copy link" />
    </div>
    <${Problem} error=${error} />`;
}
