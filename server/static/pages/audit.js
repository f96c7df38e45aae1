// The audit log, newest first.
import { html, useEffect, useState } from "../lib.js";
import { call, useApi, useSending } from "../api.js";
import { param } from "../place.js";
import { timeShown } from "../range.js";
import { TenantChoice } from "../session.js";
import { Badge, Button, Card, Empty, Loaded, PageHead, Problem, Table } from "../ui.js";

const PAGE = 100;

export default function Audit() {
  const tenant = param("tenant");
  const first = useApi("/v1/audit", { tenant, limit: PAGE });
  const [more, setMore] = useState({ rows: [], next: null });
  useEffect(() => setMore({ rows: [], next: first.data?.next ?? null }), [first.data]);
  const { error, send } = useSending();
  const goOn = () => send(async () => {
    const page = await call("GET", "/v1/audit", { params: { tenant, limit: PAGE, before: more.next } });
    setMore({ rows: [...more.rows, ...page.data], next: page.next });
  });
  const columns = [
    { key: "at", label: "Time", cell: (entry) => timeShown(entry.at, { withSeconds: true }) },
    { key: "actor", label: "Changed by", cell: (entry) => (entry.actor === "admin" ? "admin" : html`<code>${entry.actor}</code>`) },
    { key: "action", label: "Change", cell: (entry) => html`<${Badge} tone=${toneOf(entry.action)}>${entry.action}<//>` },
    { key: "tenant", label: "Tenant" },
    { key: "target", label: "Object", cell: (entry) => html`<span class="wrap">${entry.target}</span>` },
    { key: "detail", label: "Details", isFixed: true, cell: (entry) => html`<code class="wrap">${words(entry.detail)}</code>` },
  ];
  const empty = html`<${Empty} title="No changes yet.">Changes of tenants, keys, adapters, aliases and grants are listed here.<//>`;
  return html`<${PageHead} title="Audit log" about="Every change of tenants, keys, adapters, aliases and grants, newest first."><${TenantChoice} /><//>
    <${Card}>
      <${Loaded} of=${first}>${({ data }) => html`<${Table} caption="Changes" columns=${columns} rows=${[...data, ...more.rows]} keyOf=${(entry) => entry.id} first=${1e6} empty=${empty} />`}<//>
      <${Problem} error=${error} />
      ${more.next && html`<p class="more"><${Button} onClick=${goOn}>Older changes<//></p>`}
    <//>`;
}

const toneOf = (action) => (/\.(delete|revoke|withdraw)$/.test(action) ? "bad" : /\.(create|publish|grant)$/.test(action) ? "good" : "");
const words = (detail) => Object.entries(detail).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
