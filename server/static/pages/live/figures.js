// The engine's figures: tiles, adapters in memory, and counts since the start.
import { html } from "../../lib.js";
import { compact, count, percent, seconds } from "../../format.js";
import { Link, param, setParams } from "../../place.js";
import { Badge, Card, Empty, Stat, Table } from "../../ui.js";
import { adapterColour, nameOf } from "./colours.js";
import { reasonsText } from "./tenants.js";

/** The smallest value that at least this share of all values lies at or below. */
function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}

/** Tokens per second while the last steps ran. */
export function pace(steps) {
  const took = steps.reduce((sum, one) => sum + one.seconds, 0);
  return took > 0 ? steps.reduce((sum, one) => sum + one.tokens, 0) / took : null;
}

export function Tiles({ snapshot }) {
  const steps = snapshot.last_steps;
  const times = steps.map((one) => one.seconds);
  const onDevice = snapshot.residents.filter((one) => one.tier === "device").length;
  const paused = Object.values(snapshot.tenants).reduce((sum, one) => sum + one.paused, 0);
  const tokens = pace(steps);
  const small = (words) => html`<div class="stat-change quiet">${words}</div>`;
  return html`<div class="stats live-stats">
    <${Stat} label="Running" value=${count(snapshot.running)}>${small(`${count(paused)} paused, ${count(snapshot.base_running)} of the base`)}<//>
    <${Stat} label="Waiting" value=${count(snapshot.waiting)}>${small(reasonsText(snapshot.waiting_reasons, 2) || "none")}<//>
    <${Stat} label="Tokens/s" value=${tokens === null ? "–" : compact(tokens)}>${small(steps.length ? `while the last ${steps.length} steps ran` : "no step yet")}<//>
    <${Stat} label="Step time" value=${seconds(quantile(times, 0.5))}>${small(`p95 ${seconds(quantile(times, 0.95))}`)}<//>
    <${Stat} label="On the device" value=${count(onDevice)}>${small(`adapters, of ${count(snapshot.slots)} slots`)}<//>
    <${Stat} label="Prefix hits" value=${snapshot.prefix_queries ? percent(snapshot.prefix_hits / snapshot.prefix_queries) : "–"}>${small(`${compact(snapshot.prefix_hits)} of ${compact(snapshot.prefix_queries)} prompt tokens`)}<//>
    <${Stat} label="Usage lag" value=${seconds(snapshot.usage_lag_s)}>${small("until usage is in the database")}<//>
  </div>`;
}

const TIERS = { device: ["good", "device"], loading: ["warn", "loading"], host: ["info", "host"] };

export function Residents({ snapshot }) {
  const figure = (key, label) => ({ key, label, isNumber: true, cell: (one) => count(one[key]) });
  const columns = [
    { key: "adapter", label: "Adapter", value: (one) => nameOf(one.digest, one.adapters), cell: (one) => html`<span class="resident"><span class=${`swatch ${adapterColour(one.digest)}`} /><${Names} of=${one} /></span>` },
    { key: "tier", label: "Where", cell: (one) => html`<${Badge} tone=${TIERS[one.tier][0]}>${TIERS[one.tier][1]}<//>${one.pinned && html` <${Badge}>pinned<//>`}` },
    figure("pages", "Pages"), figure("prefix_pages", "Prefix pages"), figure("running", "Running"), figure("holds", "Waiting"), figure("uses", "Requests"), figure("loads", "Loads"),
    { key: "load_p95_s", label: "Load p95", isNumber: true, cell: (one) => seconds(one.load_p95_s) },
  ];
  return html`<${Card} title="Adapters in memory" note=${`${snapshot.residents.length} now; others are loaded when a request needs them`}>
    ${snapshot.residents.length
      ? html`<${Table} caption="Adapters in memory" columns=${columns} rows=${snapshot.residents} keyOf=${(one) => one.digest} sort=${param("sort", "-running")} onSort=${(sort) => setParams({ sort })} first=${25} />`
      : html`<${Empty} title="No adapter is in memory.">The first request for an adapter loads it. <${Link} to="/adapters">Show all adapters<//><//>`}
  <//>`;
}

function Names({ of: resident }) {
  const [first, ...more] = resident.adapters;
  if (!first) return html`<code>${nameOf(resident.digest, [])}</code>`;
  const [, tenant, name] = first.match(/^([^/]+)\/(.+)@\d+$/) ?? [];
  return html`<span>${name ? html`<${Link} to=${`/adapters/${encodeURIComponent(name)}`} params=${{ tenant }}>${first}<//>` : first}${more.length > 0 && html` <span class="quiet" title=${more.join(", ")}>and ${more.length} more</span>`}</span>`;
}

export function Since({ snapshot }) {
  const loads = Object.entries(snapshot.loads).map(([path, number]) => {
    const [way, result] = path.split(":");
    return { path, number, label: `${way.replace(">", " → ")}${result === "ok" ? "" : ` (${result})`}`, p95: result === "ok" ? snapshot.load_p95_s[way] : undefined };
  });
  const { preemptions, evictions, host_pages: host } = snapshot;
  const allHost = Object.values(host).reduce((a, b) => a + b, 0);
  return html`<${Card} title="Since the engine started">
    <dl class="facts">
      <dt>Steps</dt><dd data-count="steps">${count(snapshot.num_steps)}</dd>
      <dt>Adapters loaded</dt><dd>${loads.length ? loads.map((one) => html`<div key=${one.path} data-load=${one.path}>${one.label}: ${count(one.number)}${one.p95 !== undefined && html` <span class="quiet">p95 ${seconds(one.p95)}</span>`}</div>`) : "none"}</dd>
      <dt>Evicted</dt><dd data-count="evictions">${count(evictions.adapter ?? 0)} adapters and ${count(evictions.prefix ?? 0)} blocks of prefix cache</dd>
      <dt>Preempted</dt><dd data-count="preemptions">${count((preemptions.swap ?? 0) + (preemptions.recompute ?? 0))} <span class="quiet">· ${count(preemptions.swap ?? 0)} swapped to the host, ${count(preemptions.recompute ?? 0)} to be computed again</span></dd>
      <dt>Host memory</dt><dd data-count="host">${count(allHost - (host.free ?? 0))} of ${count(allHost)} pages <span class="quiet">· ${count(host.adapter ?? 0)} of adapters, ${count(host.kv ?? 0)} of KV</span></dd>
      <dt>HTTP requests now</dt><dd>${count(snapshot.http_requests)}</dd>
    </dl>
  <//>`;
}
