// All tenants, with what they used and what they may use.
import { html, useState } from "../lib.js";
import { call, useApi, useSending } from "../api.js";
import { compact, time } from "../format.js";
import { LimitFields, Limits, useLimits } from "../limits.js";
import { Link, go, param, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf, zoneShown } from "../range.js";
import { Button, Card, Dialog, Empty, Field, Loaded, Problem, Table } from "../ui.js";

export const title = "Tenants";

export default function Tenants() {
  const range = rangeShown();
  const tenants = useApi("/v1/tenants", { limit: 1000 }, { all: true });
  const usage = useApi("/v1/usage", { ...spanOf(range), group_by: "tenant", limit: 10000 });
  const [isMaking, setMaking] = useState(false);
  const used = new Map((usage.data?.data ?? []).map((row) => [row.tenant, row]));
  const figure = (key, label) => ({ key, label, isNumber: true, value: (one) => used.get(one.name)?.[key] ?? 0, cell: (one) => compact(used.get(one.name)?.[key] ?? 0) });
  const columns = [
    { key: "name", label: "Tenant", cell: (one) => html`<${Link} to=${`/tenants/${one.name}`}>${one.name}<//>` },
    figure("requests", "Requests"),
    figure("prompt_tokens", "Prompt tokens"),
    figure("completion_tokens", "Completion tokens"),
    { key: "limits", label: "Limits", isFixed: true, cell: (one) => html`<${Limits} limits=${one.limits} />` },
    { key: "created_at", label: "Created", cell: (one) => time(one.created_at, zoneShown()) },
  ];
  return html`<div class="page-head"><div><h1>Tenants</h1><p class="quiet">Who may call, what they used, and what they may use.</p></div>
      <div class="picker"><${RangePicker} /><${Button} kind="main" onClick=${() => setMaking(true)}>New tenant<//></div></div>
    <${Card}>
      <${Problem} error=${usage.error} />
      <${Loaded} of=${tenants}>${(found) =>
        found.data.length
          ? html`<${Table} caption="Tenants" columns=${columns} rows=${found.data} keyOf=${(one) => one.id} sort=${param("sort", "name")} onSort=${(sort) => setParams({ sort })} />`
          : html`<${Empty} title="No tenant yet.">A tenant owns adapters and keys. Make the first with “New tenant”, or <code>weft tenant create acme</code>.<//>`}
      <//>
    <//>
    ${isMaking && html`<${NewTenant} onClose=${() => setMaking(false)} />`}`;
}

function NewTenant({ onClose }) {
  const [name, setName] = useState("");
  const { error, send } = useSending();
  const own = useLimits({});
  const isName = /^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$/.test(name) && !name.includes("..");
  const make = () =>
    send(async () => {
      await call("POST", "/v1/tenants", { body: { name, limits: own.limits } });
      go(`/tenants/${name}`);
    });
  return html`<${Dialog} title="New tenant" onClose=${onClose}>
    <${Field} label="Name" value=${name} autofocus autocomplete="off" name="name" onInput=${(event) => setName(event.target.value)}
      hint="It stands in front of its adapters' names, and cannot be changed." error=${name && !isName ? "Small letters, digits, and . _ - between them; at most 63." : null} />
    <details><summary>Limits; they can be changed later</summary><${LimitFields} values=${own.values} onChange=${own.setValues} /></details>
    <${Problem} error=${error} />
    <div class="actions end"><${Button} onClick=${onClose}>Cancel<//><${Button} kind="main" disabled=${!isName || !own.isValid} onClick=${make}>Make the tenant<//></div>
  <//>`;
}
