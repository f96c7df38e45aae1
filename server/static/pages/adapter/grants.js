// Who else may call an adapter.
import { html, useState } from "../../lib.js";
import { call, useApi } from "../../api.js";
import { time } from "../../format.js";
import { zoneShown } from "../../range.js";
import { isAdmin, may } from "../../session.js";
import { Button, Card, Confirm, Empty, Field, Loaded, Problem, Select } from "../../ui.js";
import { useChange } from "../../adapter_parts.js";

export function Grants({ it, path, params, versions }) {
  const grants = useApi(`${path}/grants`, params);
  const { error, run } = useChange(grants.reload);
  const [tenant, setTenant] = useState("");
  const [version, setVersion] = useState("");
  const [doomed, setDoomed] = useState(null);
  const add = async (event) => {
    event.preventDefault();
    const body = { tenant: tenant.trim(), ...(version ? { version: Number(version) } : {}) };
    if (body.tenant && (await run(() => call("POST", `${path}/grants`, { params, body }), `It may be called as ${it.tenant}/${it.name} now.`))) setTenant("");
  };
  const called = (grant) => `${it.tenant}/${it.name}${grant.version === null ? "" : `@${grant.version}`}`;
  return html`<${Card} title="Who else may call it">
    <${Loaded} of=${grants} lines=${2}>${({ data }) =>
      data.length
        ? html`<div class="table-box" tabindex="0" role="region" aria-label="Grants"><table><caption class="unseen">Grants</caption>
          <thead><tr><th scope="col">Tenant</th><th scope="col">Calls it as</th><th scope="col">Since</th>${may("adapters") && html`<th scope="col"><span class="unseen">Actions</span></th>`}</tr></thead>
          <tbody>${data.map((grant) => html`<tr key=${`${grant.tenant_id} ${grant.version}`} data-grantee=${grant.tenant}>
            <td>${grant.tenant}</td><td><code>${called(grant)}</code></td><td>${time(grant.created_at, zoneShown())}</td>
            ${may("adapters") && html`<td class="number"><${Button} kind="small danger" aria-label=${`Take the grant of ${grant.tenant} back`} onClick=${() => setDoomed(grant)}>Take back<//></td>`}
          </tr>`)}</tbody></table></div>`
        : html`<${Empty} title="Nobody else.">Only keys of ${it.tenant} may call it.<//>`}<//>
    <${Problem} error=${error} />
    ${may("adapters") && html`<form class="inline-form" onSubmit=${add}>
      <${Field} label="Other tenant" name="grantee" autocomplete="off" value=${tenant} placeholder=${isAdmin() ? "name or ten_…" : "ten_…"} onInput=${(event) => setTenant(event.target.value)}
        hint=${isAdmin() ? null : "Its id, which its own keys see in GET /v1/me."} />
      <${Select} label="May call" value=${version} onChange=${setVersion} options=${[{ value: "", label: "Every version" }, ...versions.map((one) => ({ value: String(one.version), label: `Version ${one.version}` }))]} />
      <${Button} type="submit" disabled=${!tenant.trim()}>Grant<//>
    </form>`}
    ${doomed && html`<${Confirm} title=${`Take the grant of ${doomed.tenant} back?`} verb="Take it back" onClose=${() => setDoomed(null)}
      act=${async () => {
        await call("DELETE", `${path}/grants/${encodeURIComponent(doomed.tenant_id)}`, { params: { ...params, version: doomed.version ?? undefined } });
        grants.reload();
      }}><p>New requests of ${doomed.tenant} for <code>${called(doomed)}</code> are refused at once; running ones finish.</p><//>`}
  <//>`;
}
