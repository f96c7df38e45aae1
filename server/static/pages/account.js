// What a tenant's own key may do, and what is taken of its limits.
import { html } from "../lib.js";
import { useApi } from "../api.js";
import { time } from "../format.js";
import { Scopes } from "../keys.js";
import { LimitBars } from "../limits.js";
import { zoneShown } from "../range.js";
import { Card, Copy, Loaded } from "../ui.js";

export const title = "Key and limits";

export default function Account() {
  const state = useApi("/v1/me", {}, { everyS: 5 });
  return html`<div class="page-head"><div><h1>Key and limits</h1><p class="quiet">The key you signed in with, its limits, and how much of them is used.</p></div></div>
    <${Loaded} of=${state}>${(me) => html`<div class="columns">
      <${Card} title="Key">
        <dl class="facts">
          <dt>Tenant</dt><dd>${me.tenant?.name ?? "–"}</dd>
          <dt>Tenant id</dt><dd>${me.tenant && html`<code>${me.tenant.id}</code> <${Copy} text=${me.tenant.id} />`} <span class="quiet">others need it to grant you their adapters</span></dd>
          ${me.key && html`<dt>Key</dt><dd>${me.key.name ?? "(no name)"} <code>${me.key.prefix}…</code></dd>
            <dt>Allowed to</dt><dd><${Scopes} of=${me.key} /></dd>
            <dt>Expires</dt><dd>${me.key.expires_at ? time(me.key.expires_at, zoneShown()) : "never"}</dd>`}
        </dl>
        <p class="quiet">Keys are made, changed and revoked by the admin.</p>
      <//>
      <${Card} title="Limits of the tenant"><${LimitBars} limits=${me.limits.tenant} used=${me.used.tenant} /><//>
      ${me.key && html`<${Card} title="Limits of this key"><${LimitBars} limits=${me.limits.key} used=${me.used.key} /><//>`}
    </div>`}<//>`;
}
