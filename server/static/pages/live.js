// The engine now: its requests, and how adapters and KV cache share one memory.
import { html, useEffect } from "../lib.js";
import { useApi } from "../api.js";
import { compact, count, percent, seconds } from "../format.js";
import { Link, param, setParams } from "../place.js";
import { timeShown } from "../range.js";
import { Badge, Button, Card, Empty, Facts, PageHead, Problem, Residency, Skeleton, Stat, Table, numbers } from "../ui.js";
import { useFeed } from "./live/feed.js";
import { Memory } from "./live/memory.js";
import { adapterColour, giveColours, nameOf } from "./live/pool.js";
import { Steps } from "./live/steps.js";

export default function Live() {
  const server = param("server");
  const [feed, change] = useFeed(server);
  const snapshot = feed.isPaused ? feed.held : feed.newest;
  const isReplica = snapshot?.role === "replica";
  useEffect(() => {
    if (isReplica && !server) setParams({ server: snapshot.server }, { replace: true });
  }, [isReplica, server]);
  if (snapshot) giveColours([...new Set([...snapshot.residents, ...(snapshot.batches?.adapters ?? [])].map((one) => one.digest))]);
  return html`<${Head} feed=${feed} change=${change} snapshot=${snapshot} />
    <${Notices} feed=${feed} change=${change} snapshot=${snapshot} />
    ${(isReplica || server) && html`<${Servers} shown=${server} />`}
    ${snapshot
      ? html`<${Tiles} snapshot=${snapshot} />
          <${Memory} snapshot=${snapshot} feed=${feed} />
          <${Tenants} snapshot=${snapshot} />
          <div class="columns live-columns"><${Steps} snapshot=${snapshot} /><${Since} snapshot=${snapshot} /></div>
          <${Residents} snapshot=${snapshot} />`
      : !feed.problem && html`<${Skeleton} />`}`;
}

const SERVER_TONES = { ready: "good", draining: "warn", ejected: "warn", down: "bad", lost: "bad" };

/** The servers that a gateway knows; a choice of the replica that the page shows. */
function Servers({ shown }) {
  const { data, error, reload } = useApi("/v1/servers", {}, { everyS: 2 });
  if (error?.status === 404) return null; // the server is no gateway
  const columns = [
    { key: "server", label: "Server", value: (one) => one.name, cell: (one) => (one.role === "replica" ? html`<${Link} to="/live" params=${{ server: one.name }} aria-current=${one.name === shown}>${one.name}<//>` : one.name) },
    { key: "role", label: "Role" },
    { key: "state", label: "State", cell: (one) => html`<${Badge} tone=${SERVER_TONES[one.state]} data-server-state=${one.state}>${one.state}<//>` },
    numbers("running", "Running", count), numbers("waiting", "Waiting", count), numbers("in_flight", "In flight", count), numbers("backlog_s", "Backlog", seconds),
    numbers("device", "On device", count, (one) => one.adapters?.device), numbers("host", "On host", count, (one) => one.adapters?.host),
    { key: "url", label: "Address" },
  ];
  return html`<${Card} title="Servers" note="below is the engine of the chosen replica">
    <${Problem} error=${error} retry=${reload} />
    ${data && html`<${Table} caption="Servers" columns=${columns} rows=${data.data} keyOf=${(one) => one.name} sort="role" first=${16} />`}
  <//>`;
}

function numberFormat({ dtype, memory, geometry }) {
  const kept = [...(memory.weights === "bf16" ? [] : [`${memory.weights} weights`]), ...(geometry.is_kv_int8 ? ["int8 KV cache"] : [])];
  return kept.length ? `${dtype} with ${kept.join(" and ")}` : dtype;
}

const STATES = { live: ["good", "Live"], connecting: ["", "Connecting"], broken: ["bad", "Reconnecting"], paused: ["", "Paused"] };

function Head({ feed: { isPaused, state, newest }, change, snapshot }) {
  const shown = isPaused ? "paused" : state;
  const [tone, word] = STATES[shown];
  const about = snapshot && `${snapshot.model} on ${snapshot.ready.device}, ${numberFormat(snapshot.ready)}; context of ${snapshot.ready.max_model_len} tokens`;
  return html`<${PageHead} title="Live" about=${about}>
    <div class="actions"><span role="status"><${Badge} tone=${tone} data-state=${shown}><span class="dot" /> ${word}<//></span>
      <${Button} onClick=${() => change({ isPaused: !isPaused, held: isPaused ? null : newest })} aria-pressed=${isPaused}>${isPaused ? "Continue" : "Pause"}<//></div>
  <//>`;
}

function Notices({ feed: { state, problem, heardAt, restartedAt }, change, snapshot }) {
  const clock = (at) => timeShown(at, { withSeconds: true }).slice(11);
  const isIdle = snapshot && !problem && state === "live" && snapshot.running === 0 && snapshot.waiting === 0;
  return html`
    ${state === "broken" && html`<div class="notice bad" role="alert"><p><strong>The connection broke.</strong> ${heardAt ? `The page shows the state at ${clock(heardAt)}. ` : ""}It reconnects by itself.</p></div>`}
    <${Problem} error=${problem} />
    ${restartedAt && html`<div class="notice warn" role="status"><p><strong>The engine was restarted</strong> before ${clock(restartedAt)}. Its memory is empty at first; adapters are loaded again when requests need them.</p>
      <${Button} kind="small" onClick=${() => change({ restartedAt: null })}>OK<//></div>`}
    ${isIdle && html`<div class="notice" data-notice="idle"><p><strong>The engine is idle.</strong> ${snapshot.num_steps ? `Its last step ended at ${clock(heardAt - 1000 * snapshot.last_step_age_s)}.` : "It has had no request yet."}${" "}
      Send a request in the <${Link} to="/playground">Playground<//>, or run <code>manylora demo</code> for a minute of traffic.</p></div>`}`;
}

/** The smallest value that at least this share of all values lies at or below. */
function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}

const sum = (rows, of = (row) => row) => rows.reduce((total, row) => total + of(row), 0);

function Tiles({ snapshot }) {
  const steps = snapshot.last_steps;
  const times = steps.map((one) => one.seconds);
  const onDevice = snapshot.residents.filter((one) => one.tier === "device").length;
  const paused = sum(Object.values(snapshot.tenants), (one) => one.paused);
  const pace = sum(times) > 0 ? compact(sum(steps, (one) => one.tokens) / sum(times)) : "–";
  const small = (words) => html`<div class="stat-change quiet">${words}</div>`;
  return html`<div class="stats live-stats">
    <${Stat} label="Running" value=${count(snapshot.running)}>${small(`${count(paused)} paused, ${count(snapshot.base_running)} of the base`)}<//>
    <${Stat} label="Waiting" value=${count(snapshot.waiting)}>${small(inWords(snapshot.waiting_reasons, REASONS, 2) || "none")}<//>
    <${Stat} label="Tokens/s" value=${pace}>${small(steps.length ? `while the last ${steps.length} steps ran` : "no step yet")}<//>
    <${Stat} label="Step time" value=${seconds(quantile(times, 0.5))}>${small(`p95 ${seconds(quantile(times, 0.95))}`)}<//>
    <${Stat} label="On the device" value=${count(onDevice)}>${small(`adapters, of ${count(snapshot.slots)} slots`)}<//>
    <${Stat} label="Prefix hits" value=${snapshot.prefix_queries ? percent(snapshot.prefix_hits / snapshot.prefix_queries) : "–"}>${small(`${compact(snapshot.prefix_hits)} of ${compact(snapshot.prefix_queries)} prompt tokens`)}<//>
    <${Stat} label="Usage lag" value=${seconds(snapshot.usage_lag_s)}>${small("until usage is in the database")}<//>
  </div>`;
}

function Residents({ snapshot }) {
  const columns = [
    { key: "adapter", label: "Adapter", value: (one) => nameOf(one.digest, one.adapters), cell: (one) => html`<span class="resident"><span class=${`swatch ${adapterColour(one.digest)}`} /><${Names} of=${one} /></span>` },
    { key: "tier", label: "Where", cell: (one) => html`<${Residency} of=${one.tier} />${one.pinned && html` <${Badge}>pinned<//>`}` },
    ...Object.entries({ pages: "Pages", prefix_pages: "Prefix pages", running: "Running", holds: "Waiting", uses: "Requests", loads: "Loads" }).map(([key, label]) => numbers(key, label, count)),
    numbers("load_p95_s", "Load p95", seconds),
  ];
  const empty = html`<${Empty} title="No adapter is in memory.">The first request for an adapter loads it. <${Link} to="/adapters">Show all adapters<//><//>`;
  return html`<${Card} title="Adapters in memory" note=${`${snapshot.residents.length} now; others are loaded when a request needs them`}>
    <${Table} caption="Adapters in memory" columns=${columns} rows=${snapshot.residents} keyOf=${(one) => one.digest} empty=${empty} sort=${param("sort", "-running")} onSort=${(sort) => setParams({ sort })} first=${25} />
  <//>`;
}

function Names({ of: resident }) {
  const [first, ...more] = resident.adapters;
  if (!first) return html`<code>${nameOf(resident.digest, [])}</code>`;
  const [, tenant, name] = first.match(/^([^/]+)\/(.+)@\d+$/) ?? [];
  return html`<span>${name ? html`<${Link} to=${`/adapters/${encodeURIComponent(name)}`} params=${{ tenant }}>${first}<//>` : first}${more.length > 0 && html` <span class="quiet" title=${more.join(", ")}>and ${more.length} more</span>`}</span>`;
}

function Since({ snapshot }) {
  const loads = Object.entries(snapshot.loads).map(([path, number]) => {
    const [way, result] = path.split(":");
    const isLoaded = result === "ok";
    return html`<div key=${path} data-load=${path}>${way.replace(">", " → ")}${isLoaded ? "" : ` (${result})`}: ${count(number)}
      ${isLoaded && html` <span class="quiet">p95 ${seconds(snapshot.load_p95_s[way])}</span>`}</div>`;
  });
  const { evictions, host_pages: host } = snapshot;
  const { swap = 0, recompute = 0 } = snapshot.preemptions;
  const all = sum(Object.values(host));
  return html`<${Card} title="Since the engine started"><${Facts} of=${{
    Steps: count(snapshot.num_steps),
    "Adapters loaded": loads.length ? loads : "none",
    Evicted: `${count(evictions.adapter ?? 0)} adapters and ${count(evictions.prefix ?? 0)} blocks of prefix cache`,
    Preempted: html`${count(swap + recompute)} <span class="quiet">· ${count(swap)} swapped to the host, ${count(recompute)} to be computed again</span>`,
    "Host memory": html`${count(all - (host.free ?? 0))} of ${count(all)} pages <span class="quiet">· ${count(host.adapter ?? 0)} of adapters, ${count(host.kv ?? 0)} of KV</span>`,
    "HTTP requests now": count(snapshot.http_requests),
  }} /><//>`;
}

const REASONS = { LOADING: "loading", GRAMMAR: "grammar", NO_ROOM: "no room", NO_PAGES: "no pages", FORK: "shared prompt", NEW: "in line" };
/** Why requests were refused; other codes are shown as they are. */
const REFUSALS = { "limit.queue": "over share", "server.overloaded": "overload", engine_overloaded: "queue full", "deadline.queue": "too late" };

/** Counts with plain words, the `most` largest and the sum of the others: "3 in line, 1 loading". */
function inWords(counts, words, most = Infinity) {
  const sorted = Object.entries(counts).filter(([, number]) => number > 0).sort(([, a], [, b]) => b - a);
  const rest = sum(sorted.slice(most), ([, number]) => number);
  const texts = sorted.slice(0, most).map(([code, number]) => `${count(number)} ${words[code] ?? code}`);
  return [...texts, ...(rest ? [`${count(rest)} others`] : [])].map((text) => text.replaceAll(" ", "\u00a0")).join(", ");
}

const sumCounts = (all) => all.flatMap(Object.entries).reduce((sums, [key, number]) => ({ ...sums, [key]: (sums[key] ?? 0) + number }), {});

/** One row for each tenant, the most served first: those of the snapshot, those just before, and those with refusals. */
function tenantRows({ tenants, admission, lately }) {
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

/** Many rows as one: sums, and the longest wait. */
function others(rows) {
  const sums = Object.fromEntries(["weight", "due", "share", "inStep", "paused", "waiting"].map((key) => [key, sum(rows, (row) => row[key])]));
  const waits = rows.map((row) => row.wait).filter((wait) => wait !== null);
  const [reasons, refused] = ["reasons", "refused"].map((key) => sumCounts(rows.map((row) => row[key])));
  const share = rows[0].share === null ? null : sums.share;
  return { ...sums, share, name: `${count(rows.length)} others`, isMany: true, reasons, refused, wait: waits.length ? Math.max(...waits) : null };
}

/** A row's share of the service, with a mark at the share that its weight gives; `whole` fills the bar. */
function Share({ of: { share, due, isMany }, whole }) {
  const width = (part) => Math.min(100, (100 * part) / whole);
  return html`<span class="bar-cell">${!isMany && html`<svg class="bar-track" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
    <rect class="s0" width=${width(share)} height="8" rx="1" />${due !== null && html`<rect class="due" x=${width(due) - 2} width="2" height="8" />`}</svg>`}
    <span class="served" data-figure="share">${percent(share)}</span></span>`;
}

function tenantName({ name, isMany }) {
  if (isMany) return name;
  return name === "(admin)" ? "admin" : html`<${Link} to=${`/tenants/${encodeURIComponent(name)}`}>${name}<//>`;
}

/** Requests in the engine by tenant: running, waiting and why. */
function Tenants({ snapshot }) {
  const rows = tenantRows(snapshot);
  const whole = Math.max(1e-9, ...rows.map((row) => Math.max(row.share, row.due)));
  const columns = [
    { key: "name", label: "Tenant", cell: tenantName },
    { key: "weight", label: "Weight", isNumber: true, cell: (row) => (row.weight === null ? "–" : html`${count(row.weight)} <span class="quiet">${percent(row.due)}</span>`) },
    { key: "share", label: "Served lately", isNumber: true, cell: (row) => html`<${Share} of=${row} whole=${whole} />` },
    numbers("inStep", "In step", count), numbers("paused", "Paused", count), numbers("waiting", "Waiting", count),
    { key: "reasons", label: "Why", isFixed: true, cell: (row) => inWords(row.reasons, REASONS) },
    { key: "wait", label: "Predicted wait", isNumber: true, cell: ({ wait }) => (wait !== null && wait < 0.05 ? "none" : seconds(wait)) },
    { key: "refused", label: "Refused", isNumber: true, value: (row) => sum(Object.values(row.refused)), cell: (row) => inWords(row.refused, REFUSALS) || "none" },
  ];
  return html`<${Card} title="Tenants" note="running and waiting requests, and why they wait">
    <${Table} caption="Tenants in the engine" columns=${columns} rows=${rows} keyOf=${(row) => row.name} others=${others} sort="-share" first=${10}
      empty=${html`<${Empty} title="No tenant has a request in the engine.">Tenants with requests are shown here with their share and why their requests wait.<//>`} />
    ${rows.length > 0 && html`<details class="as-table"><summary>What the columns say</summary><${Facts} of=${WORDS} /></details>`}
  <//>`;
}

const WORDS = {
  Weight: "The tenant's weight, and its share of the engine among the tenants with requests now. The mark in the bar shows that share.",
  "Served lately": "The tenant's share of the work of the last seconds.",
  Paused: "Requests that hold memory pages but were left out of the last step.",
  Why: "In line: other requests are first. Loading: the adapter is being loaded. No room: no pages or slot free for the adapter. No pages: no pages free for KV cache. Shared prompt: the first of several choices computes the prompt.",
  "Predicted wait": "How long a new request would wait for its first step; in the row of many tenants, the longest.",
  Refused: "Over share: status 429, the tenant uses more than its share. Overload, queue full and too late: status 503, because the server cannot start the request in time, the queue is full, or the request waited longer than its deadline. The counts are cleared ten minutes after the tenant's last request.",
};
