// The usage explorer: any query of usage as bars, table and file. The address holds the query.
import { html, useEffect, useId, useRef, useState } from "../lib.js";
import { call, callAll, me, send, useApi, useSending } from "../api.js";
import { compact, count, digitsOf, exactMoney, time } from "../format.js";
import { param, paramAll, place, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf } from "../range.js";
import { isAdmin } from "../session.js";
import { Button, Card, Copy, Empty, FirstProblem, Loaded, PageHead, Problem, Segmented, Select, Table, numbers, say, useWindowEvents } from "../ui.js";
import { Legend, StackedBars } from "../charts.js";
import { DIMENSIONS, METRICS, chartOf, formatOf, keyName, nameOf } from "../usage_rows.js";
import { dayOf } from "../zone.js";

const DEFAULT_RANGE = "30d";
const LIMIT = 10_000;

export default function Usage() {
  const range = rangeShown(DEFAULT_RANGE);
  const question = questionShown();
  const { groups, metric, top, filters, isPerBucket } = question;
  const asked = { ...spanOf(range), ...filters, group_by: groups.join() };
  const about = { ...question, range };
  const inBuckets = { ...asked, bucket: range.bucket, tz: range.zone };
  const chart = useApi("/v1/usage", { ...inBuckets, limit: LIMIT, ...(groups.length && { top, rank_by: METRICS[metric].rankBy }) }, { about });
  const rowsAsked = isPerBucket ? inBuckets : asked;
  const table = useApi("/v1/usage", { ...rowsAsked, limit: LIMIT }, { all: true, about });
  const keys = useKeys(range, groups.includes("key") || paramAll("key").length > 0);
  const currency = table.data?.currency ?? chart.data?.currency;
  return html`<${PageHead} title="Usage" about="Exact usage by tenant, adapter, version, key and status.">
      <${RangePicker} otherwise=${DEFAULT_RANGE} withBucket=${true} /><//>
    <${Filters} range=${range} keys=${keys} />
    <${FirstProblem} of=${[table, chart]} />
    <${ChartCard} chart=${chart} question=${question} keys=${keys} currency=${currency} />
    <${TableCard} table=${table} asked=${rowsAsked} range=${range} filters=${filters} isPerBucket=${isPerBucket} keys=${keys} />`;
}

function ChartCard({ chart, question, keys, currency }) {
  const { metric, groups, top } = question;
  const groupChoices = dimensionsShown().map((name) => [name, DIMENSIONS[name]]);
  const metrics = Object.entries(METRICS).filter(([name]) => name !== "cost" || currency || metric === "cost").map(([name, { label }]) => [name, label]);
  const none = ["none", "Nothing"];
  const actions = html`<div class="chart-choices">
    <${Select} label="Show" value=${metric} options=${metrics} onChange=${(value) => setParams({ metric: value, sort: null })} />
    <${Select} label="Group by" value=${question.group ?? "none"} options=${[...groupChoices, none]} onChange=${(value) => setParams({ group: value, subgroup: null, sort: null })} />
    ${question.group && html`<${Select} label="Then by" value=${question.subgroup ?? "none"} options=${[none, ...groupChoices.filter(([name]) => name !== question.group)]} onChange=${(value) => setParams({ subgroup: value, sort: null })} />`}
    ${question.group && html`<${Segmented} label="Groups with a colour" value=${String(top)} options=${TOPS.map((number) => [number, `Top ${number}`])} onChange=${(value) => setParams({ top: value })} />`}</div>`;
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
  const [short, exact] = [compact, count].map((plain) => formatOf(metric, answer.currency, plain));
  return html`<${StackedBars} buckets=${buckets} series=${series} label=${titleOf(metric, groups)} format=${short} exact=${exact} />
    <${Legend} series=${series} format=${exact} />
    ${metric === "cached_tokens" && groups.length > 0 && html`<p class="quiet">Groups are ranked by prompt tokens; cached tokens are a part of them.</p>`}`;
}

function Nothing() {
  const isFiltered = Object.entries(filtersShown()).some(([name, values]) => name !== "tenant" && values.length);
  if (isFiltered) return html`<${Empty} title="No usage matches these filters in this range."><${Button} onClick=${() => setParams({ adapter: null, version: null, key: null, status: null })}>Clear the filters<//><//>`;
  return html`<${Empty} title="No usage in this range.">Choose a longer range, or send a request: it is shown here as soon as it ends. <code>manylora usage</code> shows the same on the command line.<//>`;
}

const FIGURES = { requests: "Requests", prompt_tokens: "Prompt", cached_tokens: "Cached", completion_tokens: "Completion" };

function columnsOf(answer, { groups, isPerBucket, range }, keys) {
  const dimensions = [...new Set(groups.flatMap((group) => (group === "version" ? ["adapter", "version"] : [group])))];
  const when = { key: "start", label: range.bucket === "1d" ? "Day" : range.bucket === "1h" ? "Hour" : "Minute", cell: (row) => time(row.start, range.zone).slice(0, range.bucket === "1d" ? 10 : 16) };
  const text = (dimension) => (row) => nameOf(row, dimension, keys);
  // Costs are shown with all their digits, because they must add up; all with as many as the longest.
  const digits = answer.currency ? Math.max(2, ...[answer.totals, ...answer.data].map(({ cost }) => digitsOf(cost))) : 2;
  return [
    ...(isPerBucket ? [when] : []),
    ...dimensions.map((key) => (key === "version" ? numbers(key, "Version", String) : { key, label: DIMENSIONS[key], value: text(key), cell: text(key) })),
    ...Object.entries(FIGURES).map(([key, label]) => numbers(key, label, count)),
    numbers("total_tokens", "Total tokens", count, METRICS.total_tokens.of),
    ...(answer.currency ? [{ key: "cost", label: `Cost (${answer.currency})`, isNumber: true, value: (row) => Number(row.cost), cell: (row) => exactMoney(row.cost, digits) }] : []),
  ];
}

const TableCard = ({ table, asked, range, filters, isPerBucket, keys }) => html`<${Card} title="All groups"
  actions=${html`<${Segmented} label="One row for" value=${isPerBucket ? "bucket" : "range"} onChange=${(value) => setParams({ rows: value === "range" ? null : value, sort: null })}
    options=${[["range", "Whole range"], ["bucket", { "1m": "Each minute", "1h": "Each hour", "1d": "Each day" }[range.bucket]]]} />`}>
  <${Loaded} of=${table} isQuiet lines=${3}>${(answer, about) => html`<${Sums} answer=${answer} about=${about} keys=${keys} />`}<//>
  <div class="table-foot">
    <p class="quiet">${table.at && html`Totals as of ${time(table.at, range.zone, { withSeconds: true })} (${range.zone.replaceAll("_", " ")}). Requests that end later are added.`}</p>
    <${Exports} asked=${asked} range=${range} filters=${filters} />
  </div>
<//>`;

function Sums({ answer, about, keys }) {
  if (!answer.data.length) return html`<${Nothing} />`;
  const columns = columnsOf(answer, about, keys);
  const isOnlyTotal = !about.groups.length && !about.isPerBucket;
  const rows = isOnlyTotal ? [] : answer.data.map((row, place) => ({ ...row, place }));
  const sort = columns.some((column) => column.key === param("sort")?.replace(/^-/, "")) ? param("sort") : about.isPerBucket ? "start" : `-${about.metric}`;
  return html`<${Table} caption="Usage by group" columns=${isOnlyTotal ? [{ key: "all", label: "", isFixed: true }, ...columns] : columns} rows=${rows} keyOf=${(row) => row.place}
    totals=${answer.totals} sort=${sort} onSort=${(next) => setParams({ sort: next }, { replace: true })} />`;
}

/** Buttons that hand the answers to the browser's downloads as files, and one for a link to this page. */
function Exports({ asked, range, filters }) {
  const { error, send } = useSending();
  const save = (kind, extension, type, fetchParts) => () => send(async () => {
    const name = fileName(kind, range, extension);
    const url = URL.createObjectURL(new Blob(await fetchParts(), { type }));
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    say(`Saved ${name}`);
  });
  const csv = "text/csv;charset=utf-8";
  const json = async () => [`${JSON.stringify(await callAll("/v1/usage", { ...asked, limit: LIMIT }), null, 2)}\n`];
  // With the zone: the reader of the link may be in another one.
  const here = new URL(location.pathname, location.origin);
  here.search = new URLSearchParams([...place.value.params].filter(([name]) => name !== "tz").concat([["tz", range.zone]]));
  return html`<div class="actions">
      <${Button} kind="small" onClick=${save("usage", "csv", csv, () => csvOf("/v1/usage", asked))}>CSV<//>
      <${Button} kind="small" onClick=${save("usage", "json", "application/json", json)}>JSON<//>
      <${Button} kind="small" onClick=${save("usage-events", "csv", csv, () => csvOf("/v1/usage/events", { ...spanOf(range), ...filters }))}>Events as CSV<//>
      <${Copy} text=${here.href} label="Copy link" />
    </div>
    <${Problem} error=${error} />`;
}

/** All pages of a question as one CSV: the API's own lines, the header once. */
async function csvOf(path, params) {
  const parts = [];
  for (let after; ; ) {
    const response = await send("GET", path, { params: { ...params, after, limit: LIMIT, format: "csv" } });
    const text = await response.text();
    parts.push(parts.length ? text.slice(text.indexOf("\r\n") + 2) : text);
    after = response.headers.get("x-manylora-next");
    if (!after) return parts;
  }
}

/** manylora-usage_2026-11-01_2026-11-30.csv: the first and the last day, with the hour where a range begins or ends within a day. */
function fileName(kind, { start, end, zone }, extension) {
  const isMidnight = (at) => dayOf(zone, at) !== dayOf(zone, at - 1);
  const stamp = (at, day) => (isMidnight(at) ? day : time(at, zone).replace(" ", "T").replace(":", ""));
  return `manylora-${kind}_${stamp(start, dayOf(zone, start))}_${stamp(end, dayOf(zone, end - 1))}.${extension}`;
}

const TOPS = ["5", "8", "12"];
const MAX_TENANTS = 20;
const MAX_CHOICES = 200;
/** The base model among adapters, which have no such name; the API calls it the empty text. */
const BASE = "~base";

/** The dimensions that may be chosen here. */
const dimensionsShown = () => Object.keys(DIMENSIONS).filter((dimension) => dimension !== "tenant" || isAdmin());

/** What is chosen of each dimension, as the API takes it. */
function filtersShown() {
  const chosen = { tenant: isAdmin() ? param("tenant") : null };
  for (const name of ["adapter", "version", "key", "status"]) chosen[name] = paramAll(name).map((value) => (value === BASE ? "" : value));
  return chosen;
}

/** The whole question, but for its range. */
function questionShown() {
  const known = (name) => (dimensionsShown().includes(name) ? name : null);
  const group = known(param("group", isAdmin() && !param("tenant") ? "tenant" : "adapter"));
  const subgroup = group && param("subgroup") !== group ? known(param("subgroup")) : null;
  // Adapters of several tenants may have one name.
  const isShared = isAdmin() && !param("tenant") && [group, subgroup].some((name) => name === "adapter" || name === "version");
  return {
    metric: Object.hasOwn(METRICS, param("metric")) ? param("metric") : "total_tokens",
    group,
    subgroup,
    groups: [...new Set([isShared ? "tenant" : null, group, subgroup])].filter(Boolean),
    top: Number(TOPS.includes(param("top")) ? param("top") : 8),
    filters: filtersShown(),
    isPerBucket: param("rows") === "bucket",
  };
}

/** The keys that may be shown, by id: for an admin those of the tenants shown, for a tenant its own. */
function useKeys(range, isWanted) {
  const [keys, setKeys] = useState({});
  const own = me.value.key;
  const isAsked = isWanted && isAdmin();
  const chosen = param("tenant");
  const found = useApi(isAsked && !chosen ? "/v1/usage" : null, { ...spanOf(range), group_by: "tenant", top: MAX_TENANTS, rank_by: "requests" });
  const names = chosen ? [chosen] : (found.data?.data ?? []).map((row) => row.tenant).filter(Boolean);
  const tenants = isAsked ? names : [];
  useEffect(() => {
    for (const tenant of tenants) {
      call("GET", `/v1/tenants/${encodeURIComponent(tenant)}/keys`).then(
        ({ data }) => setKeys((before) => ({ ...before, ...Object.fromEntries(data.map((key) => [key.id, key])) })),
        (error) => {
          if (error.status === undefined) throw error;
          if (error.status !== 404) say(`The names of ${tenant}'s keys are missing: ${error.message}`); // 404: the tenant is gone
        },
      );
    }
  }, [tenants.join()]);
  return own ? { ...keys, [own.id]: own } : keys;
}

/** What a value of the address is called. */
function labelOf(dimension, value, keys) {
  if (dimension === "key") return keyName(value, keys);
  return value === BASE ? "base model" : value;
}

/** The filters of all dimensions. */
const Filters = ({ range, keys }) => html`<div class="filters" role="group" aria-label="Filters">
  ${dimensionsShown().map((dimension) => html`<${Filter} key=${dimension} dimension=${dimension} range=${range} keys=${keys} />`)}
  ${dimensionsShown().some((dimension) => paramAll(dimension).length) && html`<${Button} kind="small" onClick=${() => setParams(Object.fromEntries(dimensionsShown().map((dimension) => [dimension, null])))}>Clear all<//>`}
</div>`;

/** A button that says what is chosen of a dimension and opens the list of choices. */
function Filter({ dimension, range, keys }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef(null);
  const opener = useRef(null);
  const id = useId();
  const leave = (event) => box.current?.contains(event.target) || setOpen(false);
  useWindowEvents({ pointerdown: leave, focusin: leave }, isOpen);
  const close = (event) => {
    if (event.key !== "Escape" || !isOpen) return;
    event.stopPropagation();
    setOpen(false);
    opener.current.focus();
  };
  const chosen = paramAll(dimension);
  const said = chosen.length === 0 ? "all" : chosen.length === 1 ? labelOf(dimension, chosen[0], keys) : `${chosen.length} chosen`;
  return html`<div class="filter" ref=${box} onKeyDown=${close}>
    <button type="button" class=${chosen.length ? "button chosen" : "button"} ref=${opener} aria-expanded=${isOpen} aria-controls=${isOpen ? id : undefined} onClick=${() => setOpen(!isOpen)}>
      <span class="quiet">${DIMENSIONS[dimension]}</span> <span class="filter-said">${said}</span><span aria-hidden="true" class="caret">▾</span>
    </button>
    ${isOpen && html`<${Choices} id=${id} dimension=${dimension} range=${range} chosen=${chosen} />`}
  </div>`;
}

/** Requests by value of a dimension, in the range and under the other filters, most used first; undefined until known. */
function useOptions(dimension, range) {
  const filters = { ...filtersShown(), [dimension]: null };
  const { data, error } = useApi("/v1/usage", { ...spanOf(range), ...filters, group_by: dimension, limit: LIMIT });
  const requests = new Map();
  for (const row of data?.data ?? []) {
    const value = dimension === "adapter" ? row.adapter ?? BASE : row[dimension];
    if (value !== null) requests.set(String(value), (requests.get(String(value)) ?? 0) + row.requests);
  }
  return { options: data && new Map([...requests].sort(([, a], [, b]) => b - a)), error };
}

function Choices({ id, dimension, range, chosen }) {
  const { options, error } = useOptions(dimension, range);
  const keys = useKeys(range, dimension === "key");
  const [text, setText] = useState("");
  const panel = useRef(null);
  useEffect(() => panel.current.querySelector("input").focus(), []);
  const name = DIMENSIONS[dimension].toLowerCase();
  const kept = chosen.filter((value) => !options?.has(value)).map((value) => [value, 0]);
  const found = [...kept, ...(options ?? [])].filter(([value]) => labelOf(dimension, value, keys).toLowerCase().includes(text.trim().toLowerCase()));
  const shown = found.slice(0, MAX_CHOICES);
  const choose = (values) => setParams({ [dimension]: values });
  const turn = (value) => {
    const rest = chosen.filter((one) => one !== value);
    choose(rest.length < chosen.length ? rest : dimension === "tenant" ? [value] : [...chosen, value]);
  };
  const move = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const isFirst = event.key === "Enter" && event.target.type === "search" && shown.length > 0;
    if (step || isFirst) event.preventDefault();
    if (isFirst) turn(shown[0][0]);
    const stops = [...panel.current.querySelectorAll("input")];
    if (step) stops[Math.min(stops.length - 1, Math.max(0, stops.indexOf(event.target) + step))].focus();
  };
  return html`<div class="choices" id=${id} ref=${panel} role="group" aria-label=${`Choose by ${name}`} onKeyDown=${move}>
    <input type="search" aria-label=${`Search ${name}`} placeholder="Search" value=${text} autocomplete="off" onInput=${(event) => setText(event.target.value)} />
    <${Problem} error=${error} />
    ${!options && !error && html`<p class="quiet" aria-busy="true">Loading…</p>`}
    <div class="choice-list">
      ${shown.map(([value, requests]) => html`<label key=${value} class="choice" data-value=${value}>
        <input type="checkbox" checked=${chosen.includes(value)} onChange=${() => turn(value)} />
        <span class="choice-name">${labelOf(dimension, value, keys)}</span> <span class="quiet number">${count(requests)}</span>
      </label>`)}
    </div>
    ${found.length > shown.length && html`<p class="quiet">${count(found.length - shown.length)} more; search to find them.</p>`}
    ${options && !found.length && html`<p class="quiet">${text ? "No name matches." : "No usage in this range."}</p>`}
    <p class="choice-foot"><span class="quiet">with requests in this range</span>
      ${chosen.length > 0 && html`<${Button} kind="small" onClick=${() => choose([])}>Clear<//>`}</p>
  </div>`;
}
