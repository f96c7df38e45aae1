// One adapter: facts, versions, traffic, and the changes that can be made.
import { html, useState } from "../lib.js";
import { call, useApi } from "../api.js";
import { ago, bytes, count, seconds, shortDigest, time } from "../format.js";
import { Link, go, param } from "../place.js";
import { rangeShown, spanOf, zoneShown } from "../range.js";
import { isAdmin, may } from "../session.js";
import { Badge, Button, Card, Confirm, Copy, Empty, LacksScopeNote, Loaded, Problem } from "../ui.js";
import { Residency, meaningText, useChange } from "../adapter_parts.js";
import { Aliases } from "./adapter/aliases.js";
import { Canary } from "./adapter/canary.js";
import { Grants } from "./adapter/grants.js";
import { Snippets } from "./adapter/snippets.js";
import { Traffic } from "./adapter/traffic.js";
import { Versions } from "./adapter/versions.js";

export const title = "Adapter";

export default function AdapterPage({ name }) {
  const tenant = param("tenant");
  if (isAdmin() && !tenant) return html`<${WhichTenant} name=${name} />`;
  return html`<${OneAdapter} key=${`${tenant}/${name}`} name=${name} tenant=${tenant} />`;
}

function OneAdapter({ name, tenant }) {
  const path = `/v1/adapters/${encodeURIComponent(name)}`;
  const params = { tenant };
  const adapter = useApi(path, params, { everyS: 5 });
  const versions = useApi(`${path}/versions`, params, { everyS: 5 });
  const span = { ...spanOf(rangeShown()), tenant, adapter: name, group_by: "version" };
  const usage = useApi(may("usage") ? "/v1/usage" : null, span, { everyS: 15 });
  const latency = useApi(may("usage") ? "/v1/usage/latency" : null, span, { everyS: 15 });
  const reload = () => [adapter, versions].forEach((answer) => answer.reload());
  const { error, run } = useChange(reload);
  /** Change the adapter, and say what was done. */
  const change = (body, done) => run(() => call("PATCH", path, { params, body }), done);
  if (adapter.error?.status === 404) {
    return html`<${Back} /><h1>${name}</h1><${Empty} title=${`There is no adapter ${name} here.`}>${tenant ?? "Your tenant"} has no adapter of this name.<//>`;
  }
  return html`<${Back} /><${Loaded} of=${adapter} lines=${8}>${(it) => html`<div class="stack">
    <${Head} it=${it} path=${path} params=${params} change=${change} />
    <${Problem} error=${error} />
    <div class="columns">
      <${Facts} it=${it} versions=${versions.data?.data} />
      <div class="stack"><${Report} it=${it} /><${Snippets} it=${it} /></div>
    </div>
    <${Loaded} of=${versions}>${({ data }) => html`<div class="stack">
      <${Versions} it=${it} versions=${data} usage=${usage} latency=${latency} path=${path} params=${params} change=${change} reload=${reload} />
      <div class="columns">
        <${Canary} key=${JSON.stringify(it.aliases.default ?? it.version)} it=${it} versions=${data} change=${change} />
        <${Aliases} it=${it} versions=${data} change=${change} />
      </div></div>`}<//>
    ${may("usage") ? html`<${Traffic} name=${name} tenant=${tenant} newest=${Math.max(it.version, ...(versions.data?.data ?? []).map((one) => one.version))} />` : html`<${LacksScopeNote} scope="usage" says="Requests and times are not shown" />`}
    <${Grants} it=${it} path=${path} params=${params} versions=${versions.data?.data ?? []} />
  </div>`}<//>`;
}

const Back = () => html`<p class="back"><${Link} to="/adapters">← All adapters<//></p>`;

function Head({ it, path, params, change }) {
  const [asks, setAsks] = useState(false);
  const canCall = may("infer");
  return html`<header class="page-head">
      <div><h1>${it.name} <${Residency} of=${it.residency} /> ${it.pinned && html`<${Badge} tone="info">pinned<//>`}</h1>
        <p class="quiet">of ${it.tenant} · requests for “${it.name}” use ${meaningText(it.aliases.default ?? it.version)}</p></div>
      <div class="actions">
        ${may("adapters") && html`<${Button} onClick=${() => change({ pinned: !it.pinned }, it.pinned ? `${it.name} can be evicted again.` : `${it.name} stays on the device.`)}
            title=${it.pinned ? "Let it be evicted when pages are needed" : "Keep it on the device"}>${it.pinned ? "Unpin" : "Pin"}<//>
          <${Link} class="button" to="/adapters" params=${{ upload: it.name }}>Upload a version<//>
          <${Button} kind="danger" onClick=${() => setAsks(true)}>Delete<//>`}
        ${canCall && html`<${Link} class="button main" to="/playground" params=${{ model: it.name }}>Try it<//>`}
      </div>
    </header>
    ${!may("adapters") && html`<${LacksScopeNote} scope="adapters" says="You can see this adapter, but not change it" />`}
    <${Description} key=${it.description} it=${it} change=${change} />
    ${asks && html`<${Confirm} title=${`Delete ${it.name}?`} verb="Delete it" onClose=${() => setAsks(false)}
      act=${async () => {
        await call("DELETE", path, { params });
        go("/adapters");
      }}>
      <p>This deletes all versions, aliases and grants of <strong>${it.name}</strong>. Running requests finish; new ones are refused.</p>
      <p class="quiet">Its usage is kept. This cannot be undone: keep the files if you may need them again.</p>
    <//>`}`;
}

function Description({ it, change }) {
  const [draft, setDraft] = useState(null);
  if (draft === null) {
    return html`<p class="description">${it.description || html`<span class="quiet">No description.</span>`}
      ${may("adapters") && html` <${Button} kind="small" onClick=${() => setDraft(it.description ?? "")}>${it.description ? "Edit the description" : "Add a description"}<//>`}</p>`;
  }
  const save = async () => (await change({ description: draft }, "The description is saved.")) && setDraft(null);
  return html`<div class="description-form"><label class="field"><span>Description</span>
      <textarea maxlength="4096" rows="3" value=${draft} onInput=${(event) => setDraft(event.target.value)} /></label>
    <div class="actions"><${Button} kind="main" onClick=${save}>Save<//><${Button} onClick=${() => setDraft(null)}>Cancel<//></div></div>`;
}

function Facts({ it, versions }) {
  const zone = zoneShown();
  const facts = {
    "Current version": it.version,
    Digest: html`<code title=${it.digest}>${shortDigest(it.digest)}</code> <${Copy} text=${it.digest} label="Copy digest" />`,
    Rank: it.rank,
    Targets: it.target_modules.join(", "),
    "Applied modules": `${count(it.applied_modules.applied)} of ${count(it.applied_modules.total)}`,
    Parameters: count(it.parameters),
    Size: bytes(it.size_bytes),
    "Pages on the device": it.pages === null ? "unknown: the weights cannot be read now" : count(it.pages),
    "Load p95": it.load_p95_s === null || it.load_p95_s === undefined ? html`– <span class="quiet">not loaded since it was last in memory</span>` : seconds(it.load_p95_s),
    Versions: versions ? count(versions.length) : "–",
    Created: time(it.created_at, zone),
    "Last used": it.usage?.last_used_at ? html`<span title=${time(it.usage.last_used_at, zone)}>${ago(it.usage.last_used_at)}</span>` : "never",
  };
  return html`<${Card} title="Facts"><dl class="facts">${Object.entries(facts).map(([label, value]) => html`<dt>${label}</dt><dd data-fact=${label}>${value}</dd>`)}</dl><//>`;
}

const LAYOUTS = { peft: "PEFT", mlx: "MLX (transposed when loaded)" };

function Report({ it }) {
  const { report } = it;
  if (!report) return html`<${Card} title="Check of the upload"><p class="quiet">No report was stored for this version.</p><//>`;
  return html`<${Card} title="Check of the upload" note=${`version ${it.version}`}>
    <dl class="facts">
      <dt>Result</dt><dd>${report.warnings.length ? html`<${Badge} tone="warn">served, with ${count(report.warnings.length)} ${report.warnings.length === 1 ? "warning" : "warnings"}<//>` : html`<${Badge} tone="good">no problems found<//>`}</dd>
      <dt>Number format</dt><dd>${report.dtype.join(", ")}</dd>
      <dt>Weights in the layout of</dt><dd>${LAYOUTS[report.layout]}</dd>
      <dt>Tensor names</dt><dd>${report.renamed ? `as expected, after removing a prefix from ${count(report.renamed)} of them` : "as expected"}</dd>
    </dl>
    ${report.warnings.length > 0 && html`<div class="warning"><p><strong>Possible mistakes</strong></p><ol>${report.warnings.map((warning) => html`<li>${warning}</li>`)}</ol></div>`}
  <//>`;
}

/** An admin who came here without naming the tenant. */
function WhichTenant({ name }) {
  const list = useApi("/v1/adapters", { tenant: "*", limit: 1000 }, { all: true });
  return html`<${Back} /><h1>${name}</h1><${Loaded} of=${list}>${({ data }) => {
    const owners = data.filter((one) => one.name === name).map((one) => one.tenant);
    return html`<${Empty} title=${owners.length ? "Which tenant's adapter?" : `No tenant has an adapter ${name}.`}>
      ${owners.map((tenant) => html`<p><${Link} to=${`/adapters/${encodeURIComponent(name)}`} params=${{ tenant }}>${tenant}/${name}<//></p>`)}<//>`;
  }}<//>`;
}
