// Tenants with their usage, keys and limits: all, one, and what a tenant sees of itself.
import { html, useState } from "../lib.js";
import { call, useApi } from "../api.js";
import { ago, bytes, compact, count, money } from "../format.js";
import { Link, go, param, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf, timeShown } from "../range.js";
import {
  Badge, Button, Card, ChangeDialog, Code, Confirm, Copy, Dialog, Empty, Facts, Field, Loaded, PageHead, Problem, Select, Stat, Table, confirm, numbers, openDialog, say,
} from "../ui.js";
import { NAME_RULE, isName } from "../upload_files.js";
import { METRICS } from "../usage_rows.js";

/** All tenants. */
export default function Tenants() {
  const tenants = useApi("/v1/tenants", { limit: 1000 }, { all: true });
  const usage = useApi("/v1/usage", { ...spanOf(rangeShown()), group_by: "tenant", limit: 10000 });
  const used = new Map((usage.data?.data ?? []).map((row) => [row.tenant, row]));
  const figure = (key, label) => numbers(key, label, compact, (one) => used.get(one.name)?.[key] ?? 0);
  const columns = [
    { key: "name", label: "Tenant", cell: (one) => html`<${Link} to=${`/tenants/${one.name}`}>${one.name}<//>` },
    figure("requests", "Requests"),
    figure("prompt_tokens", "Prompt tokens"),
    figure("completion_tokens", "Completion tokens"),
    { key: "limits", label: "Limits", isFixed: true, cell: (one) => html`<${Limits} limits=${one.limits} />` },
    { key: "created_at", label: "Created", cell: (one) => timeShown(one.created_at) },
  ];
  const empty = html`<${Empty} title="No tenant yet.">A tenant owns adapters and keys. Make the first with “New tenant”, or <code>manylora tenant create acme</code>.<//>`;
  return html`<${PageHead} title="Tenants" about="Who may send requests, with their usage and limits.">
      <div class="picker"><${RangePicker} /><${Button} kind="main" onClick=${() => openDialog(NewTenant)}>New tenant<//></div><//>
    <${Card}>
      <${Problem} error=${usage.error} />
      <${Loaded} of=${tenants}>${({ data }) => html`<${Table} caption="Tenants" columns=${columns} rows=${data} keyOf=${(one) => one.id} empty=${empty}
        sort=${param("sort", "name")} onSort=${(sort) => setParams({ sort })} />`}<//>
    <//>`;
}

function NewTenant({ onClose }) {
  const [name, setName] = useState("");
  const own = useLimits({});
  const make = async () => {
    await call("POST", "/v1/tenants", { body: { name, limits: own.limits } });
    go(`/tenants/${name}`);
  };
  return html`<${ChangeDialog} title="New tenant" verb="Make the tenant" isReady=${isName(name) && own.isValid} act=${make} onClose=${onClose}>
    <${Field} label="Name" value=${name} autofocus autocomplete="off" name="name" onInput=${(event) => setName(event.target.value)}
      hint="Other tenants write it in front of its adapters' names. It cannot be changed." error=${name && !isName(name) ? NAME_RULE : null} />
    <details><summary>Limits; they can be changed later</summary><${LimitFields} ...${own} /></details>
  <//>`;
}

/** One tenant. */
export function Tenant({ name }) {
  const range = rangeShown();
  const tenant = useApi(`/v1/tenants/${encodeURIComponent(name)}`);
  const state = useApi("/v1/me", { tenant: name }, { everyS: 10 });
  const usage = useApi("/v1/usage", { ...spanOf(range), tenant: name });
  const save = async (limits) => {
    await call("PATCH", `/v1/tenants/${name}`, { body: { limits } });
    tenant.reload();
    state.reload();
    say("The limits are in force.");
  };
  return html`<p class="back"><${Link} to="/tenants">← All tenants<//></p><${PageHead} title=${name}><${RangePicker} /><//>
    <${Loaded} of=${tenant}>${(found) => html`<div class="stack">
      <${Totals} usage=${usage} tenant=${name} />
      <${Keys} tenant=${name} range=${range} />
      <div class="columns">
        <${Card} title="Limits" note="with how much of them is used now" actions=${html`<${Button} onClick=${() => openDialog(LimitsDialog, { tenant: found, save })}>Change limits<//>`}>
          <${Loaded} of=${state}>${(me) => html`<${LimitBars} limits=${me.limits.tenant} used=${me.used.tenant} />`}<//>
        <//>
        <${Card} title="About"><${Facts} of=${{
          Id: html`<code>${found.id}</code> <${Copy} text=${found.id} />`,
          Created: timeShown(found.created_at),
          Adapters: html`<${Link} to="/adapters" params=${{ tenant: name }}>Show them<//>`,
          Usage: html`<${Link} to="/usage" params=${{ tenant: name }}>Explore it<//>`,
          Changes: html`<${Link} to="/audit" params=${{ tenant: name }}>In the audit log<//>`,
        }} />
          <div class="actions end"><${Button} kind="danger" onClick=${() => openDialog(DeleteTenant, { name })}>Delete the tenant<//></div><//>
      </div>
    </div>`}<//>`;
}

const Totals = ({ usage, tenant }) => html`<${Loaded} of=${usage} lines=${1}>${({ totals, currency }) => html`<div class="stats" aria-label=${`Usage of ${tenant}`}>
  ${["requests", "prompt_tokens", "cached_tokens", "completion_tokens"].map((name) => html`<${Stat} key=${name} label=${METRICS[name].label} value=${count(totals[name])} />`)}
  ${currency && html`<${Stat} label="Cost" value=${money(totals.cost, currency)} />`}
</div>`}<//>`;

function LimitsDialog({ tenant, onClose, save }) {
  const own = useLimits(tenant.limits);
  return html`<${ChangeDialog} title=${`Limits of ${tenant.name}`} verb="Save" isReady=${own.isValid} act=${() => save(own.limits)} onClose=${onClose}>
    <p class="quiet">An empty field is no limit. What is already stored or pinned stays, also above a new limit.</p>
    <${LimitFields} ...${own} />
  <//>`;
}

function DeleteTenant({ name, onClose }) {
  const [typed, setTyped] = useState("");
  const remove = async () => {
    await call("DELETE", `/v1/tenants/${name}`);
    say(`${name} was deleted.`);
    go("/tenants");
  };
  return html`<${Confirm} title=${`Delete ${name}?`} verb="Delete" act=${remove} isReady=${typed === name} onClose=${onClose}>
    <p>Its keys stop working at once and its adapters are deleted. This cannot be undone. Its usage is kept.</p>
    <${Field} label="Type the tenant's name to confirm" value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} />
  <//>`;
}

/** The tenant's keys; a secret is shown once. */
function Keys({ tenant, range }) {
  const keys = useApi(`/v1/tenants/${tenant}/keys`);
  const usage = useApi("/v1/usage", { ...spanOf(range), tenant, group_by: "key" });
  /** Make a key or a secret; the answer has the secret. */
  const make = async (path, body) => {
    const made = await call("POST", path, { body });
    keys.reload();
    openDialog(SecretDialog, { of: made });
  };
  const change = async (key, method, done, body) => {
    await call(method, `/v1/keys/${key.id}`, { body });
    keys.reload();
    say(done);
  };
  const askNew = () => openDialog(KeyDialog, { tenant, save: (body) => make(`/v1/tenants/${tenant}/keys`, body) });
  const askChange = (key) => openDialog(KeyDialog, { before: key, save: (body) => change(key, "PATCH", "The key was changed.", body) });
  const askRotate = (key) => openDialog(RotateDialog, { of: key, save: (body) => make(`/v1/keys/${key.id}/rotate`, body) });
  const askRevoke = (key) => confirm(`Revoke ${nameOf(key)}?`, "Revoke", () => change(key, "DELETE", `${nameOf(key)} was revoked.`),
    html`<p>Requests with <code>${key.prefix}…</code> are refused from now on, and browsers that signed in with it are signed out. This cannot be undone; its usage stays.</p>`);
  const used = new Map((usage.data?.data ?? []).map((row) => [row.key, row]));
  const button = (verb, key, ask, kind = "small") => html`<${Button} kind=${kind} aria-label=${`${verb} ${nameOf(key)}`} onClick=${() => ask(key)}>${verb}<//>`;
  const columns = [
    { key: "name", label: "Key", cell: (key) => html`<strong>${key.name ?? "(no name)"}</strong><br /><code>${key.prefix}…</code>` },
    { key: "scopes", label: "Allowed to", isFixed: true, cell: (key) => html`<${Scopes} of=${key} />` },
    { key: "limits", label: "Limits", isFixed: true, cell: (key) => html`<${Limits} limits=${key.limits} />` },
    numbers("requests", "Requests", compact, (key) => used.get(key.id)?.requests ?? 0),
    numbers("tokens", "Tokens", compact, (key) => (used.has(key.id) ? METRICS.total_tokens.of(used.get(key.id)) : 0)),
    { key: "expires_at", label: "Expires", cell: (key) => html`<span class="date">${key.expires_at ? timeShown(key.expires_at).slice(0, 10) : "never"}</span>
      <br /><span class="quiet" title=${timeShown(key.created_at)}>made ${ago(key.created_at)}</span>` },
    { key: "actions", label: "", isFixed: true, cell: (key) => html`<div class="actions">
      ${button("Change", key, askChange)}${button("Rotate", key, askRotate)}${button("Revoke", key, askRevoke, "small danger")}</div>` },
  ];
  const empty = html`<${Empty} title="No key yet.">Without one, ${tenant} cannot send requests. Make the first with “New key”, or <code>manylora key create ${tenant}</code>.<//>`;
  return html`<${Card} title="Keys" note="requests and tokens are those of the range above" actions=${html`<${Button} kind="main" onClick=${askNew}>New key<//>`}>
    <${Loaded} of=${keys}>${({ data }) => html`<${Table} caption=${`Keys of ${tenant}`} columns=${columns} rows=${data} keyOf=${(key) => key.id} empty=${empty} />`}<//>
  <//>`;
}

const nameOf = (key) => key.name ?? `${key.prefix}…`;

function KeyDialog({ tenant, before, onClose, save }) {
  const [name, setName] = useState(before?.name ?? "");
  const [scopes, setScopes] = useState(before?.scopes ?? Object.keys(SCOPES));
  const [expires, setExpires] = useState("");
  const own = useLimits(before?.limits ?? {});
  const ends = expires ? { expires_at: new Date(`${expires}T23:59:59`).toISOString() } : {};
  const body = { ...(name ? { name } : {}), scopes, limits: own.limits, ...ends };
  const turn = (scope, isOn) => setScopes(Object.keys(SCOPES).filter((one) => (one === scope ? isOn : scopes.includes(one))));
  const now = before && (before.expires_at ? timeShown(before.expires_at) : "never expires");
  return html`<${ChangeDialog} title=${before ? `Change ${nameOf(before)}` : `New key for ${tenant}`} verb=${before ? "Save" : "Make the key"} onClose=${onClose}
    isReady=${own.isValid && scopes.length > 0} act=${() => save(body)}>
    <${Field} label="Name" hint="So that people recognise the key." value=${name} maxlength="255" name="name" onInput=${(event) => setName(event.target.value)} />
    <fieldset class="checks"><legend>Allowed to</legend>
      ${Object.entries(SCOPES).map(([scope, words]) => html`<label><input type="checkbox" checked=${scopes.includes(scope)} onChange=${(event) => turn(scope, event.target.checked)} /> ${words} <span class="quiet">(${scope})</span></label>`)}
    </fieldset>
    ${!scopes.length && html`<p class="field-error">Choose at least one.</p>`}
    <${Field} label="Last day" hint=${before ? `Now: ${now}. Leave it empty to keep that.` : "Leave it empty and the key never expires."} type="date" value=${expires} onChange=${(event) => setExpires(event.target.value)} />
    <details open=${Object.keys(own.limits).length > 0}><summary>Limits of this key, in addition to those of the tenant</summary>
      <${LimitFields} ...${own} ofKey /></details>
  <//>`;
}

function RotateDialog({ of: key, onClose, save }) {
  const [grace, setGrace] = useState("0");
  return html`<${ChangeDialog} title=${`Rotate ${nameOf(key)}?`} verb="Rotate" onClose=${onClose} act=${() => save({ grace_s: Number(grace) })}>
    <p>The key gets a new secret, shown once. Name, limits and usage stay.</p>
    <${Select} label="The old secret stops working" value=${grace} onChange=${setGrace}
      options=${Object.entries({ 0: "at once", 3600: "in an hour", 86400: "in a day", 604800: "in a week" })} />
  <//>`;
}

const SecretDialog = ({ of: key, onClose }) => html`<${Dialog} title=${`The key ${nameOf(key)}`} onClose=${onClose}>
  <p><strong>The key is shown only now.</strong> Manylora does not keep it: copy it to where it is needed. Lists show its beginning, <code>${key.prefix}</code>.</p>
  <${Code} text=${key.key} label="The key" />
  <div class="actions end"><${Button} kind="main" onClick=${onClose}>I have saved it<//></div>
<//>`;

/** A tenant's own key: what it may do, and what is taken of its limits. */
export function Account() {
  const state = useApi("/v1/me", {}, { everyS: 5 });
  return html`<${PageHead} title="Key and limits" about="The key you signed in with, its limits, and how much of them is used." />
    <${Loaded} of=${state}>${({ tenant, key, limits, used }) => html`<div class="columns">
      <${Card} title="Key"><${Facts} of=${{
        Tenant: tenant?.name ?? "–",
        "Tenant id": html`${tenant && html`<code>${tenant.id}</code> <${Copy} text=${tenant.id} />`} <span class="quiet">others need it to grant you their adapters</span>`,
        Key: key !== null && html`${key.name ?? "(no name)"} <code>${key.prefix}…</code>`,
        "Allowed to": key !== null && html`<${Scopes} of=${key} />`,
        Expires: key !== null && (key.expires_at ? timeShown(key.expires_at) : "never"),
      }} /><p class="quiet">Keys are made, changed and revoked by the admin.</p><//>
      <${Card} title="Limits of the tenant"><${LimitBars} limits=${limits.tenant} used=${used.tenant} /><//>
      ${key && html`<${Card} title="Limits of this key"><${LimitBars} limits=${limits.key} used=${used.key} /><//>`}
    </div>`}<//>`;
}

/** The scopes of a key, in words. */
const SCOPES = { infer: "ask models", adapters: "change adapters", usage: "see usage" };
const Scopes = ({ of: key }) => key.scopes.map((scope) => html`<${Badge}>${SCOPES[scope] ?? scope}<//> `);

/** Each limit with its label; `key` says that a single key can have it too. */
const LIMITS = {
  requests_per_minute: { label: "Requests per minute", key: true },
  tokens_per_minute: { label: "Tokens per minute", hint: "prompt and generated", key: true },
  concurrent_requests: { label: "Requests at a time", key: true },
  tokens_per_month: { label: "Tokens per month", hint: "of a calendar month in UTC", key: true },
  adapters: { label: "Adapters" },
  stored_bytes: { label: "Stored bytes", hint: "of all adapter versions; 1 GiB is 1073741824", format: bytes },
  adapter_pages: { label: "Device pages of one adapter version" },
  pinned_pages: { label: "Pinned device pages", hint: "of all pinned adapters together" },
};

const format = (name, value) => (LIMITS[name]?.format ?? (value >= 1e6 ? compact : count))(value);

/** The limits that are set, in a few words. */
function Limits({ limits }) {
  const set = Object.entries(limits).map(([name, value]) => `${LIMITS[name]?.label ?? name}: ${format(name, value)}`);
  return html`<span class=${set.length ? "wrap" : "wrap short"}>${set.join(" · ") || "none"}</span>`;
}

/** What is used, against the limits that are set. */
function LimitBars({ limits, used }) {
  const names = Object.keys(LIMITS).filter((name) => name in limits || used[name]);
  if (!names.length) return html`<${Empty} title="No limit is set, and nothing was used yet." />`;
  return html`<ul class="limit-bars">
    ${names.map((name) => {
      const most = limits[name];
      const share = most === undefined ? null : most === 0 ? 1 : Math.min(1, (used[name] ?? 0) / most);
      const tone = share === null ? "" : share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "";
      return html`<li key=${name} data-limit=${name}>
        <div class="limit-line"><span>${LIMITS[name].label}</span>
          <span>${used[name] === undefined ? "" : html`<strong>${format(name, used[name])}</strong> `}
            <span class="quiet">${most === undefined ? "no limit" : used[name] === undefined ? `at most ${format(name, most)}` : `of ${format(name, most)}`}</span></span></div>
        ${share !== null && used[name] !== undefined && html`<meter class=${tone} min="0" max="1" value=${share} aria-label=${`${LIMITS[name].label}: ${Math.round(share * 100)}% used`} />`}
      </li>`;
    })}
  </ul>`;
}

/** Inputs for limits; an empty one does not limit. `values` maps names to texts. */
const LimitFields = ({ values, setValues, ofKey = false }) => html`<div class="limit-fields">
  ${Object.keys(LIMITS).filter((name) => !ofKey || LIMITS[name].key).map((name) => html`<${Field} key=${name} label=${LIMITS[name].label} hint=${LIMITS[name].hint}
    inputmode="numeric" placeholder="no limit" name=${name} value=${values[name] ?? ""} onInput=${(event) => setValues({ ...values, [name]: event.target.value })}
    error=${isLimit(values[name]) ? null : "A whole number of at least 0, or nothing."} />`)}
</div>`;

const isLimit = (text) => !text || /^\d{1,15}$/.test(text.trim());

/** State of `LimitFields`: the texts, the limits they mean, and whether all can be sent. */
function useLimits(limits) {
  const [values, setValues] = useState(() => Object.fromEntries(Object.entries(limits).map(([name, value]) => [name, String(value)])));
  const set = Object.entries(values).filter(([, text]) => text?.trim()).map(([name, text]) => [name, Number(text)]);
  return { values, setValues, isValid: Object.values(values).every(isLimit), limits: Object.fromEntries(set) };
}
