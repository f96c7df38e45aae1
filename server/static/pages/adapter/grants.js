// The other tenants that may call an adapter.
import { html, useState } from "../../lib.js";
import { call, useApi } from "../../api.js";
import { time } from "../../format.js";
import { zoneShown } from "../../range.js";
import { isAdmin, may } from "../../session.js";
import { Button, Card, Confirm, Empty, Field, Loaded, Problem, Select, Table } from "../../ui.js";
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
    if (body.tenant && (await run(() => call("POST", `${path}/grants`, { params, body }), `${body.tenant} may call ${it.tenant}/${it.name} now.`))) setTenant("");
  };
  const called = (grant) => `${it.tenant}/${it.name}${grant.version === null ? "" : `@${grant.version}`}`;
  const columns = [
    { key: "tenant", label: "Tenant", isFixed: true },
    { key: "called", label: "Calls it as", isFixed: true, cell: (grant) => html`<code>${called(grant)}</code>` },
    { key: "created_at", label: "Since", isFixed: true, cell: (grant) => time(grant.created_at, zoneShown()) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, isNumber: true, cell: (grant) => html`<${Button} kind="small danger" aria-label=${`Withdraw the grant of ${grant.tenant}`} onClick=${() => setDoomed(grant)}>Withdraw<//>` }] : []),
  ];
  return html`<${Card} title="Grants" note="who else may call it">
    <${Loaded} of=${grants} lines=${2}>${({ data }) =>
      data.length
        ? html`<${Table} caption="Grants" columns=${columns} rows=${data} keyOf=${(grant) => `${grant.tenant} ${grant.version ?? ""}`} />`
        : html`<${Empty} title="No other tenant.">Only keys of ${it.tenant} may call it.<//>`}<//>
    <${Problem} error=${error} />
    ${may("adapters") && html`<form class="inline-form" onSubmit=${add}>
      <${Field} label="Other tenant" name="grantee" autocomplete="off" value=${tenant} placeholder=${isAdmin() ? "name or ten_…" : "ten_…"} onInput=${(event) => setTenant(event.target.value)}
        hint=${isAdmin() ? null : "Its id: that tenant finds it on its page “Key and limits”, or with GET /v1/me."} />
      <${Select} label="May call" value=${version} onChange=${setVersion} options=${[{ value: "", label: "Every version" }, ...versions.map((one) => ({ value: String(one.version), label: `Version ${one.version}` }))]} />
      <${Button} type="submit" disabled=${!tenant.trim()}>Grant<//>
    </form>`}
    ${doomed && html`<${Confirm} title=${`Withdraw the grant of ${doomed.tenant}?`} verb="Withdraw it" onClose=${() => setDoomed(null)}
      act=${async () => {
        await call("DELETE", `${path}/grants/${encodeURIComponent(doomed.tenant_id)}`, { params: { ...params, version: doomed.version ?? undefined } });
        grants.reload();
      }}><p>New requests of ${doomed.tenant} for <code>${called(doomed)}</code> are refused at once; running ones finish.</p><//>`}
  <//>`;
}
