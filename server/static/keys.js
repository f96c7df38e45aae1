// A tenant's keys: making, changing, rotating and revoking them. A secret is shown once.
import { html, useState } from "./lib.js";
import { call, useApi } from "./api.js";
import { ago, compact, time } from "./format.js";
import { LimitFields, Limits, useLimits } from "./limits.js";
import { spanOf, zoneShown } from "./range.js";
import { Badge, Button, Card, ChangeDialog, Code, Confirm, Dialog, Empty, Field, Loaded, Select, Table, say } from "./ui.js";

/** The scopes of a key, in words. */
const SCOPES = { infer: "ask models", adapters: "change adapters", usage: "see usage" };
export const Scopes = ({ of: key }) => key.scopes.map((scope) => html`<${Badge}>${SCOPES[scope] ?? scope}<//> `);
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
  const [made, setMade] = useState(null);
  const close = () => setOpen(null);
  /** Make a key or a secret; the answer has the secret, which is shown once. */
  const make = async (path, body) => {
    setMade(await call("POST", path, { body }));
    keys.reload();
  };
  const change = async (key, body) => {
    await call("PATCH", `/v1/keys/${key.id}`, { body });
    keys.reload();
    say("The key was changed.");
  };
  const used = new Map((usage.data?.data ?? []).map((row) => [row.key, row]));
  const columns = [
    { key: "name", label: "Key", cell: (key) => html`<strong>${key.name ?? "(no name)"}</strong><br /><code>${key.prefix}…</code>` },
    { key: "scopes", label: "Allowed to", isFixed: true, cell: (key) => html`<${Scopes} of=${key} />` },
    { key: "limits", label: "Limits", isFixed: true, cell: (key) => html`<${Limits} limits=${key.limits} />` },
    { key: "requests", label: "Requests", isNumber: true, value: (key) => used.get(key.id)?.requests ?? 0, cell: (key) => compact(used.get(key.id)?.requests ?? 0) },
    { key: "tokens", label: "Tokens", isNumber: true, value: (key) => tokensOf(used.get(key.id)), cell: (key) => compact(tokensOf(used.get(key.id))) },
    { key: "expires_at", label: "Expires", cell: (key) => html`<span class="date">${key.expires_at ? time(key.expires_at, zoneShown()).slice(0, 10) : "never"}</span>
      <br /><span class="quiet" title=${time(key.created_at, zoneShown())}>made ${ago(key.created_at)}</span>` },
    {
      key: "actions", label: "", isFixed: true,
      cell: (key) => html`<div class="actions">
        <${Button} kind="small" aria-label=${`Change ${nameOf(key)}`} onClick=${() => setOpen({ what: "change", key })}>Change<//>
        <${Button} kind="small" aria-label=${`Rotate ${nameOf(key)}`} onClick=${() => setOpen({ what: "rotate", key })}>Rotate<//>
        <${Button} kind="small danger" aria-label=${`Revoke ${nameOf(key)}`} onClick=${() => setOpen({ what: "revoke", key })}>Revoke<//>
      </div>`,
    },
  ];
  return html`<${Card} title="Keys" note="requests and tokens are those of the range above" actions=${html`<${Button} kind="main" onClick=${() => setOpen({ what: "make" })}>New key<//>`}>
    <${Loaded} of=${keys}>${(found) =>
      found.data.length
        ? html`<${Table} caption=${`Keys of ${tenant}`} columns=${columns} rows=${found.data} keyOf=${(key) => key.id} />`
        : html`<${Empty} title="No key yet.">Without one, ${tenant} cannot send requests. Make the first with “New key”, or <code>weft key create ${tenant}</code>.<//>`}
    <//>
    ${open?.what === "make" && html`<${KeyDialog} tenant=${tenant} onClose=${close} save=${(body) => make(`/v1/tenants/${tenant}/keys`, body)} />`}
    ${open?.what === "change" && html`<${KeyDialog} tenant=${tenant} before=${open.key} onClose=${close} save=${(body) => change(open.key, body)} />`}
    ${open?.what === "rotate" && html`<${RotateDialog} of=${open.key} onClose=${close} save=${(body) => make(`/v1/keys/${open.key.id}/rotate`, body)} />`}
    ${made && html`<${SecretDialog} of=${made} onClose=${() => setMade(null)} />`}
    ${open?.what === "revoke" && html`<${Confirm} title=${`Revoke ${nameOf(open.key)}?`} verb="Revoke" onClose=${close}
      act=${async () => { await call("DELETE", `/v1/keys/${open.key.id}`); keys.reload(); say(`${nameOf(open.key)} was revoked.`); }}>
      <p>Requests with <code>${open.key.prefix}…</code> are refused from now on, and browsers that signed in with it are signed out. This cannot be undone; its usage stays.</p><//>`}
  <//>`;
}

const nameOf = (key) => key.name ?? `${key.prefix}…`;
const tokensOf = (row) => (row ? row.prompt_tokens + row.completion_tokens : 0);

function KeyDialog({ tenant, before, onClose, save }) {
  const [name, setName] = useState(before?.name ?? "");
  const [scopes, setScopes] = useState(before?.scopes ?? Object.keys(SCOPES));
  const [expires, setExpires] = useState("");
  const own = useLimits(before?.limits ?? {});
  const ends = expires ? { expires_at: new Date(`${expires}T23:59:59`).toISOString() } : {};
  const body = { ...(name ? { name } : {}), scopes, limits: own.limits, ...ends };
  const turn = (scope, isOn) => setScopes(Object.keys(SCOPES).filter((one) => (one === scope ? isOn : scopes.includes(one))));
  return html`<${ChangeDialog} title=${before ? `Change ${nameOf(before)}` : `New key for ${tenant}`} verb=${before ? "Save" : "Make the key"} onClose=${onClose}
    isReady=${own.isValid && scopes.length > 0} act=${() => save(body)}>
    <${Field} label="Name" hint="So that people recognise the key." value=${name} maxlength="255" name="name" onInput=${(event) => setName(event.target.value)} />
    <fieldset class="checks"><legend>Allowed to</legend>
      ${Object.entries(SCOPES).map(([scope, words]) => html`<label><input type="checkbox" checked=${scopes.includes(scope)} onChange=${(event) => turn(scope, event.target.checked)} /> ${words} <span class="quiet">(${scope})</span></label>`)}
    </fieldset>
    ${!scopes.length && html`<p class="field-error">Choose at least one.</p>`}
    <${Field} label="Last day" hint=${before ? `Now: ${before.expires_at ? time(before.expires_at, zoneShown()) : "never expires"}. Leave it empty to keep that.` : "Leave it empty and the key never expires."} type="date" value=${expires} onChange=${(event) => setExpires(event.target.value)} />
    <details open=${Object.keys(own.limits).length > 0}><summary>Limits of this key, in addition to those of the tenant</summary>
      <${LimitFields} values=${own.values} onChange=${own.setValues} ofKey /></details>
  <//>`;
}

function RotateDialog({ of: key, onClose, save }) {
  const [grace, setGrace] = useState("0");
  return html`<${ChangeDialog} title=${`Rotate ${nameOf(key)}?`} verb="Rotate" onClose=${onClose} act=${() => save({ grace_s: Number(grace) })}>
    <p>The key gets a new secret, shown once. Name, limits and usage stay.</p>
    <${Select} label="The old secret stops working" value=${grace} options=${GRACES} onChange=${setGrace} />
  <//>`;
}

function SecretDialog({ of: key, onClose }) {
  return html`<${Dialog} title=${`The key ${nameOf(key)}`} onClose=${onClose}>
    <p><strong>The key is shown only now.</strong> Weft does not keep it: copy it to where it is needed. Lists show its beginning, <code>${key.prefix}</code>.</p>
    <${Code} text=${key.key} label="The key" />
    <div class="actions end"><${Button} kind="main" onClick=${onClose}>I have saved it<//></div>
  <//>`;
}
