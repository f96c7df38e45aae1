// Who changed what, newest first.
import { html, useEffect, useState } from "../lib.js";
import { call, useApi } from "../api.js";
import { time } from "../format.js";
import { param, setParams } from "../place.js";
import { zoneShown } from "../range.js";
import { Badge, Button, Card, Empty, Loaded, Problem, Select, Table } from "../ui.js";

export const title = "Audit log";
const PAGE = 100;

export default function Audit() {
  const tenant = param("tenant");
  const tenants = useApi("/v1/tenants", { limit: 1000 });
  const first = useApi("/v1/audit", { tenant, limit: PAGE });
  const [more, setMore] = useState({ rows: [], next: null, error: null });
  useEffect(() => setMore({ rows: [], next: first.data?.next ?? null, error: null }), [first.data]);
  const goOn = async () => {
    try {
      const page = await call("GET", "/v1/audit", { params: { tenant, limit: PAGE, before: more.next } });
      setMore({ rows: [...more.rows, ...page.data], next: page.next, error: null });
    } catch (error) {
      if (error.status === undefined) throw error;
      setMore({ ...more, error });
    }
  };
  const columns = [
    { key: "at", label: "When", cell: (entry) => time(entry.at, zoneShown(), { withSeconds: true }) },
    { key: "actor", label: "Who", cell: (entry) => (entry.actor === "admin" ? "admin" : html`<code>${entry.actor}</code>`) },
    { key: "action", label: "What", cell: (entry) => html`<${Badge} tone=${toneOf(entry.action)}>${entry.action}<//>` },
    { key: "tenant", label: "Tenant" },
    { key: "target", label: "Of", cell: (entry) => html`<span class="wrap">${entry.target}</span>` },
    { key: "detail", label: "How", isFixed: true, cell: (entry) => html`<code class="wrap">${words(entry.detail)}</code>` },
  ];
  const names = (tenants.data?.data ?? []).map((one) => one.name);
  const options = [...new Set([...names, ...(tenant ? [tenant] : [])])].map((value) => ({ value, label: value }));
  return html`<div class="page-head"><div><h1>Audit log</h1><p class="quiet">Every change of tenants, keys, adapters, aliases and grants, newest first.</p></div>
      <${Select} label="Tenant" value=${tenant ?? ""} options=${[{ value: "", label: "All tenants" }, ...options]} onChange=${(value) => setParams({ tenant: value })} /></div>
    <${Card}><${Loaded} of=${first}>${(page) =>
      page.data.length
        ? html`<${Table} caption="Changes" columns=${columns} rows=${[...page.data, ...more.rows]} keyOf=${(entry) => entry.id} first=${1e6} />
            <${Problem} error=${more.error} />
            ${more.next && html`<p class="more"><${Button} onClick=${goOn}>Older changes<//></p>`}`
        : html`<${Empty} title="Nothing was changed yet.">Uploads, keys and tenants show here from the first one on.<//>`}
    <//><//>`;
}

const toneOf = (action) => (/\.(delete|revoke|withdraw)$/.test(action) ? "bad" : /\.(create|publish|grant)$/.test(action) ? "good" : "");
const words = (detail) => Object.entries(detail).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
