// One tenant: its limits with how much of them is used, and its keys.
import { html, useState } from "../lib.js";
import { call, useApi } from "../api.js";
import { count, money, time } from "../format.js";
import { Keys } from "../keys.js";
import { LimitBars, LimitFields, useLimits } from "../limits.js";
import { Link, go } from "../place.js";
import { RangePicker, rangeShown, spanOf, zoneShown } from "../range.js";
import { Button, Card, ChangeDialog, Confirm, Copy, Field, Loaded, Stat, say } from "../ui.js";

export const title = "Tenant";

export default function Tenant({ name }) {
  const range = rangeShown();
  const tenant = useApi(`/v1/tenants/${encodeURIComponent(name)}`);
  const state = useApi("/v1/me", { tenant: name }, { everyS: 10 });
  const usage = useApi("/v1/usage", { ...spanOf(range), tenant: name });
  const [open, setOpen] = useState(null);
  const close = () => setOpen(null);
  const head = html`<p class="back"><${Link} to="/tenants">← All tenants<//></p><div class="page-head"><div><h1>${name}</h1></div><${RangePicker} /></div>`;
  return html`${head}<${Loaded} of=${tenant}>${(found) => html`<div class="stack">
    <${Totals} usage=${usage} tenant=${name} />
    <${Keys} tenant=${name} range=${range} />
    <div class="columns">
      <${Card} title="Limits" note="with how much of them is used now" actions=${html`<${Button} onClick=${() => setOpen("limits")}>Change limits<//>`}>
        <${Loaded} of=${state}>${(me) => html`<${LimitBars} limits=${me.limits.tenant} used=${me.used.tenant} />`}<//>
      <//>
      <${Card} title="About">
        <dl class="facts">
          <dt>Id</dt><dd><code>${found.id}</code> <${Copy} text=${found.id} /></dd>
          <dt>Created</dt><dd>${time(found.created_at, zoneShown())}</dd>
          <dt>Adapters</dt><dd><${Link} to="/adapters" params=${{ tenant: name }}>Show them<//></dd>
          <dt>Usage</dt><dd><${Link} to="/usage" params=${{ tenant: name }}>Explore it<//></dd>
          <dt>Changes</dt><dd><${Link} to="/audit" params=${{ tenant: name }}>In the audit log<//></dd>
        </dl>
        <div class="actions end"><${Button} kind="danger" onClick=${() => setOpen("delete")}>Delete the tenant<//></div>
      <//>
    </div>
    ${open === "limits" && html`<${LimitsDialog} tenant=${found} onClose=${close} onDone=${() => { tenant.reload(); state.reload(); say("The limits are in force."); }} />`}
    ${open === "delete" && html`<${DeleteTenant} name=${name} onClose=${close} />`}
  </div>`}<//>`;
}

function Totals({ usage, tenant }) {
  return html`<${Loaded} of=${usage} lines=${1}>${({ totals, currency }) => html`<div class="stats" aria-label=${`Usage of ${tenant}`}>
    <${Stat} label="Requests" value=${count(totals.requests)} />
    <${Stat} label="Prompt tokens" value=${count(totals.prompt_tokens)} />
    <${Stat} label="Cached tokens" value=${count(totals.cached_tokens)} />
    <${Stat} label="Completion tokens" value=${count(totals.completion_tokens)} />
    ${currency && html`<${Stat} label="Cost" value=${money(totals.cost, currency)} />`}
  </div>`}<//>`;
}

function LimitsDialog({ tenant, onClose, onDone }) {
  const own = useLimits(tenant.limits);
  const save = async () => onDone(await call("PATCH", `/v1/tenants/${tenant.name}`, { body: { limits: own.limits } }));
  return html`<${ChangeDialog} title=${`Limits of ${tenant.name}`} verb="Save" isReady=${own.isValid} act=${save} onClose=${onClose}>
    <p class="quiet">An empty field is no limit. What is already stored or pinned stays, also above a new limit.</p>
    <${LimitFields} values=${own.values} onChange=${own.setValues} />
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
