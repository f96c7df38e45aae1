// All tenants with their usage and limits.
import { html, useState } from "../lib.js";
import { call, useApi } from "../api.js";
import { compact, time } from "../format.js";
import { LimitFields, Limits, useLimits } from "../limits.js";
import { Link, go, param, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf, zoneShown } from "../range.js";
import { Button, Card, ChangeDialog, Empty, Field, Loaded, Problem, Table } from "../ui.js";
import { NAME_RULE, isName } from "../upload_files.js";

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
  return html`<div class="page-head"><div><h1>Tenants</h1><p class="quiet">Who may send requests, with their usage and limits.</p></div>
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
  const own = useLimits({});
  const make = async () => {
    await call("POST", "/v1/tenants", { body: { name, limits: own.limits } });
    go(`/tenants/${name}`);
  };
  return html`<${ChangeDialog} title="New tenant" verb="Make the tenant" isReady=${isName(name) && own.isValid} act=${make} onClose=${onClose}>
    <${Field} label="Name" value=${name} autofocus autocomplete="off" name="name" onInput=${(event) => setName(event.target.value)}
      hint="Other tenants write it in front of its adapters' names. It cannot be changed." error=${name && !isName(name) ? NAME_RULE : null} />
    <details><summary>Limits; they can be changed later</summary><${LimitFields} values=${own.values} onChange=${own.setValues} /></details>
  <//>`;
}
