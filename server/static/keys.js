// A tenant's keys: making, changing, rotating and revoking them. A secret is shown once.
import { html, useState } from "./lib.js";
import { call, useApi, useSending } from "./api.js";
import { ago, compact, time } from "./format.js";
import { LimitFields, Limits, useLimits } from "./limits.js";
import { spanOf, zoneShown } from "./range.js";
import { Badge, Button, Card, Code, Confirm, Dialog, Empty, Field, Loaded, Problem, Select, Table, say } from "./ui.js";

/** What keys may be made for, in words. */
export const SCOPES = { infer: "ask models", adapters: "change adapters", usage: "see usage" };
const GRACES = [
  { value: "0", label: "at once" },
  { value: "3600", label: "in an hour" },
  { value: "86400", label: "in a day" },
  { value: "604800", label: "in a week" },
];

/** @param {{tenant: string, range: ReturnType<import("./range.js").rangeShown>}} props */
export function Keys({ tenant, range }) {
  const keys = useApi(`/v1/tenants/${tenant}/keys`);
  const usage = useApi("/v1/usage", { ...spanOf(range), tenant, group_by: "key" });
  const [open, setOpen] = useState(null);
  const close = () => setOpen(null);
  const made = (key) => {
    keys.reload();
    setOpen({ what: "secret", key });
  };
  const used = new Map((usage.data?.data ?? []).map((row) => [row.key, row]));
  const columns = [
    { key: "name", label: "Key", cell: (key) => html`<strong>${key.name ?? "without a name"}</strong><br /><code>${key.prefix}…</code>` },
    { key: "scopes", label: "May", isFixed: true, cell: (key) => key.scopes.map((scope) => html`<${Badge}>${SCOPES[scope] ?? scope}<//> `) },
    { key: "limits", label: "Limits", isFixed: true, cell: (key) => html`<${Limits} limits=${key.limits} />` },
    { key: "requests", label: "Requests", isNumber: true, value: (key) => used.get(key.id)?.requests ?? 0, cell: (key) => compact(used.get(key.id)?.requests ?? 0) },
    { key: "tokens", label: "Tokens", isNumber: true, value: (key) => tokensOf(used.get(key.id)), cell: (key) => compact(tokensOf(used.get(key.id))) },
    { key: "expires_at", label: "Expires", cell: (key) => (key.expires_at ? time(key.expires_at, zoneShown()) : "never") },
    { key: "created_at", label: "Created", cell: (key) => html`<span title=${time(key.created_at, zoneShown())}>${ago(key.created_at)}</span>` },
    {
      key: "actions", label: "", isFixed: true,
      cell: (key) => html`<div class="actions">
        <${Button} kind="small" aria-label=${`Change ${nameOf(key)}`} onClick=${() => setOpen({ what: "change", key })}>Change<//>
        <${Button} kind="small" aria-label=${`Rotate ${nameOf(key)}`} onClick=${() => setOpen({ what: "rotate", key })}>Rotate<//>
        <${Button} kind="small danger" aria-label=${`Revoke ${nameOf(key)}`} onClick=${() => setOpen({ what: "revoke", key })}>Revoke<//>
      </div>`,
    },
  ];
  return html`<${Card} title="Keys" note="requests and tokens of the shown range" actions=${html`<${Button} kind="main" onClick=${() => setOpen({ what: "make" })}>New key<//>`}>
    <${Loaded} of=${keys}>${(found) =>
      found.data.length
        ? html`<${Table} caption=${`Keys of ${tenant}`} columns=${columns} rows=${found.data} keyOf=${(key) => key.id} />`
        : html`<${Empty} title="No key yet.">Without one, ${tenant} cannot send requests. Make the first with “New key”, or <code>weft key create ${tenant}</code>.<//>`}
    <//>
    ${open?.what === "make" && html`<${KeyDialog} tenant=${tenant} onClose=${close} onDone=${made} />`}
    ${open?.what === "change" && html`<${KeyDialog} tenant=${tenant} before=${open.key} onClose=${close} onDone=${() => { keys.reload(); close(); say("The key was changed."); }} />`}
    ${open?.what === "rotate" && html`<${RotateDialog} of=${open.key} onClose=${close} onDone=${made} />`}
    ${open?.what === "secret" && html`<${SecretDialog} of=${open.key} onClose=${close} />`}
    ${open?.what === "revoke" && html`<${Confirm} title=${`Revoke ${nameOf(open.key)}?`} verb="Revoke" onClose=${close}
      act=${async () => { await call("DELETE", `/v1/keys/${open.key.id}`); keys.reload(); say(`${nameOf(open.key)} works no more.`); }}>
      <p>Requests with <code>${open.key.prefix}…</code> are refused from now on, and browsers that signed in with it are signed out. This cannot be undone; its usage stays.</p><//>`}
  <//>`;
}

const nameOf = (key) => key.name ?? `${key.prefix}…`;
const tokensOf = (row) => (row ? row.prompt_tokens + row.completion_tokens : 0);

function KeyDialog({ tenant, before, onClose, onDone }) {
  const [name, setName] = useState(before?.name ?? "");
  const [scopes, setScopes] = useState(before?.scopes ?? Object.keys(SCOPES));
  const [expires, setExpires] = useState("");
  const { error, send } = useSending();
  const own = useLimits(before?.limits ?? {});
  const save = () => {
    const ends = expires ? { expires_at: new Date(`${expires}T23:59:59`).toISOString() } : {};
    const body = { ...(name ? { name } : {}), scopes, limits: own.limits, ...ends };
    return send(async () => onDone(before ? await call("PATCH", `/v1/keys/${before.id}`, { body }) : await call("POST", `/v1/tenants/${tenant}/keys`, { body })));
  };
  const turn = (scope, isOn) => setScopes(Object.keys(SCOPES).filter((one) => (one === scope ? isOn : scopes.includes(one))));
  return html`<${Dialog} title=${before ? `Change ${nameOf(before)}` : `New key for ${tenant}`} onClose=${onClose}>
    <${Field} label="Name" hint="By which people tell it from others." value=${name} maxlength="255" name="name" onInput=${(event) => setName(event.target.value)} />
    <fieldset class="checks"><legend>It may</legend>
      ${Object.entries(SCOPES).map(([scope, words]) => html`<label><input type="checkbox" checked=${scopes.includes(scope)} onChange=${(event) => turn(scope, event.target.checked)} /> ${words} <span class="quiet">(${scope})</span></label>`)}
    </fieldset>
    ${!scopes.length && html`<p class="field-error">A key that may do nothing cannot be made.</p>`}
    <${Field} label="Last day" hint=${before ? `Now: ${before.expires_at ? time(before.expires_at, zoneShown()) : "never expires"}. Nothing leaves it so.` : "Nothing: it never expires."} type="date" value=${expires} onChange=${(event) => setExpires(event.target.value)} />
    <details open=${Object.keys(own.limits).length > 0}><summary>Limits of this key, beside those of the tenant</summary>
      <${LimitFields} values=${own.values} onChange=${own.setValues} ofKey /></details>
    <${Problem} error=${error} />
    <div class="actions end"><${Button} onClick=${onClose}>Cancel<//><${Button} kind="main" disabled=${!own.isValid || !scopes.length} onClick=${save}>${before ? "Save" : "Make the key"}<//></div>
  <//>`;
}

function RotateDialog({ of: key, onClose, onDone }) {
  const [grace, setGrace] = useState("0");
  const { error, send } = useSending();
  const rotate = () => send(async () => onDone(await call("POST", `/v1/keys/${key.id}/rotate`, { body: { grace_s: Number(grace) } })));
  return html`<${Dialog} title=${`Rotate ${nameOf(key)}?`} onClose=${onClose}>
    <p>The key gets a new secret, shown once. Name, limits and usage stay.</p>
    <${Select} label="The secret before stops working" value=${grace} options=${GRACES} onChange=${setGrace} />
    <${Problem} error=${error} />
    <div class="actions end"><${Button} onClick=${onClose}>Cancel<//><${Button} kind="main" onClick=${rotate}>Rotate<//></div>
  <//>`;
}

function SecretDialog({ of: key, onClose }) {
  return html`<${Dialog} title=${`The key ${nameOf(key)}`} onClose=${onClose}>
    <p><strong>It is shown this once.</strong> Weft keeps no copy that could be read again: put it where it belongs now. Later it is known by <code>${key.prefix}</code>.</p>
    <${Code} text=${key.key} label="The key" />
    <div class="actions end"><${Button} kind="main" onClick=${onClose}>I have kept it<//></div>
  <//>`;
}
