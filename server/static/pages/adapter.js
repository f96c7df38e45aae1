// One adapter: its facts, its traffic, who may call it, and the changes that can be made.
import { html, useState } from "../lib.js";
import { call, useApi, useSending } from "../api.js";
import { ago, bytes, count, seconds, shortDigest } from "../format.js";
import { Link, go, param, setParams } from "../place.js";
import { rangeShown, spanOf, timeShown } from "../range.js";
import { isAdmin, may } from "../session.js";
import {
  Badge, Button, Card, ChangeDialog, Copy, Empty, Facts, Field, LacksScopeNote, Loaded, PageHead, Problem, Residency, Segmented, Select, Table, confirm, openDialog, say,
} from "../ui.js";
import { Legend, StackedBars } from "../charts.js";
import { METRICS, chartOf } from "../usage_rows.js";
import { Aliases, Canary, Versions, meaningText, versionColour, versionOptions } from "./adapter/versions.js";
import { Snippet } from "./playground/snippets.js";

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
  const { error, send } = useSending();
  /** Change the adapter, and say what was done. */
  const save = async (body, done) => {
    await call("PATCH", path, { params, body });
    say(done);
    reload();
  };
  /** The same; a refusal is shown on the page, and gives false. */
  const change = (body, done) => send(() => save(body, done));
  if (adapter.error?.status === 404) {
    return html`<${Back} /><h1>${name}</h1><${Empty} title=${`There is no adapter ${name} here.`}>${tenant ?? "Your tenant"} has no adapter of this name.<//>`;
  }
  return html`<${Back} /><${Loaded} of=${adapter} lines=${8}>${(it) => html`<div class="stack">
    <${Head} it=${it} path=${path} params=${params} save=${save} change=${change} />
    <${Problem} error=${error} />
    <div class="columns">
      <${FactsCard} it=${it} versions=${versions.data?.data} />
      <div class="stack"><${Report} it=${it} /><${Snippets} it=${it} /></div>
    </div>
    <${Loaded} of=${versions}>${({ data }) => html`<div class="stack">
      <${Versions} it=${it} versions=${data} usage=${usage} latency=${latency} path=${path} params=${params} change=${change} reload=${reload} />
      <div class="columns">
        <${Canary} key=${JSON.stringify(it.aliases.default ?? it.version)} it=${it} versions=${data} change=${change} />
        <${Aliases} it=${it} versions=${data} change=${change} />
      </div></div>`}<//>
    ${may("usage") ? html`<${Traffic} name=${name} tenant=${tenant} />` : html`<${LacksScopeNote} scope="usage" says="Requests and times are not shown" />`}
    <${Grants} it=${it} path=${path} params=${params} versions=${versions.data?.data ?? []} />
  </div>`}<//>`;
}

const Back = () => html`<p class="back"><${Link} to="/adapters">← All adapters<//></p>`;

function Head({ it, path, params, save, change }) {
  const remove = async () => {
    await call("DELETE", path, { params });
    go("/adapters");
  };
  const askRemove = () => confirm(`Delete ${it.name}?`, "Delete it", remove,
    html`<p>This deletes all versions, aliases and grants of <strong>${it.name}</strong>. Running requests finish; new ones are refused.</p>
      <p class="quiet">Its usage is kept. This cannot be undone: keep the files if you may need them again.</p>`);
  const title = html`${it.name} <${Residency} of=${it.residency} /> ${it.pinned && html`<${Badge} tone="info">pinned<//>`}`;
  return html`<${PageHead} title=${title} about=${`of ${it.tenant} · requests for “${it.name}” use ${meaningText(it.aliases.default ?? it.version)}`}>
      <div class="actions">
        ${may("adapters") && html`<${Button} onClick=${() => change({ pinned: !it.pinned }, it.pinned ? `${it.name} can be evicted again.` : `${it.name} stays on the device.`)}
            title=${it.pinned ? "Let it be evicted when pages are needed" : "Keep it on the device"}>${it.pinned ? "Unpin" : "Pin"}<//>
          <${Link} class="button" to="/adapters" params=${{ upload: it.name }}>Upload a version<//>
          <${Button} kind="danger" onClick=${askRemove}>Delete<//>`}
        ${may("infer") && html`<${Link} class="button main" to="/playground" params=${{ model: it.name }}>Try it<//>`}
      </div>
    <//>
    ${!may("adapters") && html`<${LacksScopeNote} scope="adapters" says="You can see this adapter, but not change it" />`}
    <p class="description">${it.description || html`<span class="quiet">No description.</span>`}
      ${may("adapters") && html` <${Button} kind="small" onClick=${() => openDialog(DescriptionDialog, { it, save })}>${it.description ? "Edit the description" : "Add a description"}<//>`}</p>`;
}

function DescriptionDialog({ it, save, onClose }) {
  const [text, setText] = useState(it.description ?? "");
  return html`<${ChangeDialog} title=${`Describe ${it.name}`} verb="Save" act=${() => save({ description: text }, "The description is saved.")} onClose=${onClose}>
    <${Field} label="Description">${(id) => html`<textarea id=${id} maxlength="4096" rows="3" value=${text} onInput=${(event) => setText(event.target.value)} />`}<//>
  <//>`;
}

const FactsCard = ({ it, versions }) => html`<${Card} title="Facts"><${Facts} of=${{
  "Current version": it.version,
  Digest: html`<code title=${it.digest}>${shortDigest(it.digest)}</code> <${Copy} text=${it.digest} label="Copy digest" />`,
  Rank: it.rank,
  Targets: it.target_modules.join(", "),
  "Applied modules": `${count(it.applied_modules.applied)} of ${count(it.applied_modules.total)}`,
  Parameters: count(it.parameters),
  Size: bytes(it.size_bytes),
  "Pages on the device": it.pages === null ? "unknown: the weights cannot be read now" : count(it.pages),
  "Load p95": it.load_p95_s === null ? html`– <span class="quiet">not loaded since it was last in memory</span>` : seconds(it.load_p95_s),
  Versions: versions ? count(versions.length) : "–",
  Created: timeShown(it.created_at),
  "Last used": it.usage?.last_used_at ? html`<span title=${timeShown(it.usage.last_used_at)}>${ago(it.usage.last_used_at)}</span>` : "never",
}} /><//>`;

const LAYOUTS = { peft: "PEFT", mlx: "MLX (transposed when loaded)" };

function Report({ it }) {
  const { report } = it;
  if (!report) return html`<${Card} title="Check of the upload"><p class="quiet">No report was stored for this version.</p><//>`;
  const number = report.warnings.length;
  return html`<${Card} title="Check of the upload" note=${`version ${it.version}`}><${Facts} of=${{
    Result: number ? html`<${Badge} tone="warn">served, with ${count(number)} ${number === 1 ? "warning" : "warnings"}<//>` : html`<${Badge} tone="good">no problems found<//>`,
    "Number format": report.dtype.join(", "),
    "Weights in the layout of": LAYOUTS[report.layout],
    "Tensor names": report.renamed ? `as expected, after removing a prefix from ${count(report.renamed)} of them` : "as expected",
  }} />
    ${number > 0 && html`<div class="warning"><p><strong>Possible mistakes</strong></p><ol>${report.warnings.map((warning) => html`<li>${warning}</li>`)}</ol></div>`}<//>`;
}

/** How programs call it. */
const Snippets = ({ it }) => html`<${Card} title="Call it">
  <p class="quiet">Set <code>MANYLORA_KEY</code> to a key of ${it.tenant} with the scope <code>infer</code>. <code>${it.name}@${it.version}</code> always means this version.</p>
  <${Snippet} request=${{ path: "/v1/chat/completions", tenant: null, body: { model: it.name, messages: [{ role: "user", content: "Where is my order?" }] } }} />
<//>`;

/** Its requests or tokens over time, by version. */
function Traffic({ name, tenant }) {
  const range = rangeShown();
  const usage = useApi("/v1/usage", { ...spanOf(range), tz: range.zone, tenant, adapter: name, bucket: range.bucket, group_by: "version", limit: 10_000 }, { all: true, everyS: 15, about: range });
  const metric = param("measure") === "total_tokens" ? "total_tokens" : "requests";
  const options = ["requests", "total_tokens"].map((one) => [one, METRICS[one].label]);
  const empty = html`<${Empty} title="No requests in this range.">Choose a longer range, or try the adapter in the playground.<//>`;
  return html`<${Card} title="Usage" note="by version" actions=${html`<${Segmented} label="Measure" value=${metric} options=${options} onChange=${(measure) => setParams({ measure })} />`}>
    <${Loaded} of=${usage}>${(answer, about) => {
      const { buckets, series } = chartOf(answer, about, { groups: ["version"], metric, top: answer.data.length });
      const versions = series.map((one) => ({ ...one, key: `v${one.row.version}`, label: `Version ${one.row.version}`, className: versionColour(one.row) }));
      versions.sort((a, b) => a.row.version - b.row.version);
      return versions.length ? html`<${StackedBars} label=${`${METRICS[metric].label} by version`} buckets=${buckets} series=${versions} /><${Legend} series=${versions} />
        <p class="quiet"><${Link} to="/usage" params=${{ adapter: name, group: "version" }}>All its figures in the usage explorer<//></p>` : empty;
    }}<//>
  <//>`;
}

/** The other tenants that may call it. */
function Grants({ it, path, params, versions }) {
  const grants = useApi(`${path}/grants`, params);
  const { error, send } = useSending();
  const [tenant, setTenant] = useState("");
  const [version, setVersion] = useState("");
  const add = async () => {
    await call("POST", `${path}/grants`, { params, body: { tenant: tenant.trim(), version: version ? Number(version) : undefined } });
    say(`${tenant.trim()} may call ${it.tenant}/${it.name} now.`);
    grants.reload();
    setTenant("");
  };
  const called = (grant) => `${it.tenant}/${it.name}${grant.version === null ? "" : `@${grant.version}`}`;
  const withdraw = async (grant) => {
    await call("DELETE", `${path}/grants/${encodeURIComponent(grant.tenant_id)}`, { params: { ...params, version: grant.version } });
    grants.reload();
  };
  const askWithdraw = (grant) => confirm(`Withdraw the grant of ${grant.tenant}?`, "Withdraw it", () => withdraw(grant),
    html`<p>New requests of ${grant.tenant} for <code>${called(grant)}</code> are refused at once; running ones finish.</p>`);
  const columns = [
    { key: "tenant", label: "Tenant", isFixed: true },
    { key: "called", label: "Calls it as", isFixed: true, cell: (grant) => html`<code>${called(grant)}</code>` },
    { key: "created_at", label: "Since", isFixed: true, cell: (grant) => timeShown(grant.created_at) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, isNumber: true, cell: (grant) => html`<${Button} kind="small danger" aria-label=${`Withdraw the grant of ${grant.tenant}`} onClick=${() => askWithdraw(grant)}>Withdraw<//>` }] : []),
  ];
  const empty = html`<${Empty} title="No other tenant.">Only keys of ${it.tenant} may call it.<//>`;
  return html`<${Card} title="Grants" note="who else may call it">
    <${Loaded} of=${grants} lines=${2}>${({ data }) => html`<${Table} caption="Grants" columns=${columns} rows=${data} keyOf=${(grant) => `${grant.tenant} ${grant.version ?? ""}`} empty=${empty} />`}<//>
    <${Problem} error=${error} />
    ${may("adapters") && html`<form class="inline-form" onSubmit=${(event) => (event.preventDefault(), send(add))}>
      <${Field} label="Other tenant" name="grantee" autocomplete="off" value=${tenant} placeholder=${isAdmin() ? "name or ten_…" : "ten_…"} onInput=${(event) => setTenant(event.target.value)}
        hint=${isAdmin() ? null : "Its id: that tenant finds it on its page “Key and limits”, or with GET /v1/me."} />
      <${Select} label="May call" value=${version} onChange=${setVersion} options=${[["", "Every version"], ...versionOptions(versions)]} />
      <${Button} type="submit" disabled=${!tenant.trim()}>Grant<//>
    </form>`}
  <//>`;
}

/** An admin who came here without naming the tenant. */
const WhichTenant = ({ name }) => html`<${Back} /><h1>${name}</h1><${Empty} title="Which tenant's adapter?">
  <${Link} to="/adapters" params=${{ search: name }}>Show the adapters of this name<//><//>`;
