// All adapters: where each is, how it was used, and how to upload one.
import { html, useEffect, useMemo, useState } from "../lib.js";
import { useApi } from "../api.js";
import { ago, compact, count, percent, seconds } from "../format.js";
import { Link, param, setParams } from "../place.js";
import { RangePicker, rangeShown, spanOf, timeShown } from "../range.js";
import { isAdmin, may } from "../session.js";
import { Badge, Button, Code, Empty, Field, FirstProblem, LacksScopeNote, Loaded, PageHead, Residency, Segmented, Table, numbers } from "../ui.js";
import { UploadDialog, UploadStrip, isUnderWay, job, targetsText } from "../upload.js";
import { useDrops } from "../upload_files.js";

const PLACES = { device: "Device", host: "Host", stored: "Stored", pinned: "Pinned" };

export default function AdaptersPage() {
  const tenant = param("tenant");
  const shown = isAdmin() ? (tenant ?? "*") : undefined;
  const list = useApi("/v1/adapters", { tenant: shown, limit: 1000 }, { all: true, everyS: 5 });
  const span = { ...spanOf(rangeShown()), tenant, group_by: "tenant,adapter" };
  const usage = useApi(may("usage") ? "/v1/usage" : null, { ...span, limit: 10_000 }, { all: true, everyS: 15 });
  const latency = useApi(may("usage") ? "/v1/usage/latency" : null, span, { everyS: 15 });
  const rows = useMemo(() => rowsOf(list.data, usage.data, latency.data), [list.data, usage.data, latency.data]);
  const [given, setGiven] = useState([]);
  const upload = param("upload");
  const open = (name) => setParams({ upload: name || "new" });
  const drop = (files) => {
    if (!isUnderWay()) job.value = null;
    setGiven(files);
    open(param("upload"));
  };
  const isOver = useDrops(drop, may("adapters"));
  useEffect(() => job.subscribe((state) => state?.phase === "done" && list.reload()), []);
  return html`<${PageHead} title="Adapters" about=${`The adapters of ${isAdmin() ? (tenant ?? "all tenants") : "your tenant"}, with their usage in the range shown.`}>
      <div class="picker"><${RangePicker} />${may("adapters") && html`<${Button} kind="main" onClick=${() => open()}>Upload adapter<//>`}</div>
    <//>
    ${!may("adapters") && html`<${LacksScopeNote} scope="adapters" says="You can see adapters, but not change them" />`}
    ${!may("usage") && html`<${LacksScopeNote} scope="usage" says="Requests and times are not shown" />`}
    ${!upload && html`<${UploadStrip} onOpen=${() => open()} />`}
    <${FirstProblem} of=${[usage, latency]} />
    <${Loaded} of=${list} lines=${8}>${() => (rows.length ? html`<${Shown} rows=${rows} withTenant=${isAdmin() && !tenant} />` : html`<${First} tenant=${tenant} open=${() => open()} />`)}<//>
    ${isOver && html`<div class="drop-hint" role="status"><p>Drop the adapter's folder, or its config and weights</p></div>`}
    ${upload && may("adapters") && html`<${UploadDialog} given=${given} name=${upload === "new" ? "" : upload} tenant=${tenant} known=${rows} isOver=${isOver}
      onAgain=${() => setGiven([])} onClose=${() => (setGiven([]), setParams({ upload: null }))} />`}`;
}

/** One row per adapter with its figures; the table can sort by any of them. */
function rowsOf(list, usage, latency) {
  const keyOf = (row) => `${row.tenant}/${row.adapter}`;
  const asked = new Map((usage?.data ?? []).map((row) => [keyOf(row), row]));
  const timed = new Map((latency?.data ?? []).map((row) => [keyOf(row), row]));
  return (list?.data ?? []).map((adapter) => {
    const key = `${adapter.tenant}/${adapter.name}`;
    const sums = asked.get(key);
    return { ...adapter, key, targets: targetsText(adapter.target_modules), last: adapter.usage?.last_used_at ?? null,
      requests: usage && (sums?.requests ?? 0), tokens: usage && (sums ? sums.prompt_tokens + sums.completion_tokens : 0),
      hit_rate: timed.get(key)?.hit_rate, ttft: timed.get(key)?.ttft_s?.p95 };
  });
}

function Shown({ rows, withTenant }) {
  const [search, where] = [param("search", ""), param("where", "")];
  const isThere = (row, name) => (name === "pinned" ? row.pinned : row.residency === name);
  const counts = Object.fromEntries(Object.keys(PLACES).map((name) => [name, rows.filter((row) => isThere(row, name)).length]));
  const found = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.key} ${row.description ?? ""} ${row.targets} ${row.digest}`.toLowerCase();
    return rows.filter((row) => (!where || isThere(row, where)) && words.every((word) => text(row).includes(word)));
  }, [rows, search, where]);
  const tabs = [["", `All ${count(rows.length)}`], ...Object.entries(PLACES).map(([name, label]) => [name, `${label} ${count(counts[name])}`])];
  return html`<section class="card" aria-label="List of adapters">
      <div class="list-head">
        <${Field} label="Search" type="search" name="search" placeholder="Name, description, target, digest" value=${search}
          onInput=${(event) => setParams({ search: event.target.value }, { replace: true })} />
        <${Segmented} label="Where they are" value=${where} options=${tabs} onChange=${(value) => setParams({ where: value })} />
      </div>
      <${Table} key=${`${search} ${where}`} caption="Adapters" columns=${columnsOf(withTenant)} rows=${found} keyOf=${(row) => row.key} sort=${param("sort", "name")} onSort=${(sort) => setParams({ sort })}
        empty=${html`<${Empty} title="No adapter matches."><${Button} onClick=${() => setParams({ search: null, where: null })}>Show all<//><//>`} />
    </section>`;
}

const columnsOf = (withTenant) => [
  { key: "name", label: "Name", cell: (row) => html`<${Link} to=${`/adapters/${encodeURIComponent(row.name)}`} params=${isAdmin() ? { tenant: row.tenant } : {}}>${row.name}<//>` },
  ...(withTenant ? [{ key: "tenant", label: "Tenant" }] : []),
  { key: "residency", label: "Where", cell: (row) => html`<${Residency} of=${row.residency} />`, value: (row) => ["device", "host", "stored"].indexOf(row.residency) },
  numbers("pages", "Pages", count),
  ...(may("usage") ? [numbers("requests", "Requests", compact), numbers("tokens", "Tokens", compact), numbers("hit_rate", "Hit rate", percent), numbers("ttft", "TTFT p95", seconds)] : []),
  numbers("load_p95_s", "Load p95", seconds),
  numbers("version", "Version", count),
  numbers("rank", "Rank", count),
  { key: "targets", label: "Targets", cell: (row) => html`<span title=${row.target_modules.join(", ")}>${row.targets}</span>` },
  { key: "pinned", label: "Pinned", cell: (row) => (row.pinned ? html`<${Badge} tone="info">pinned<//>` : "–"), value: (row) => (row.pinned ? 0 : 1) },
  { key: "last", label: "Last used", cell: (row) => html`<span title=${timeShown(row.last)}>${ago(row.last)}</span>`, value: (row) => row.last },
];

/** What to do where nothing is yet. */
function First({ tenant, open }) {
  const owner = isAdmin() && (tenant ?? "NAME");
  const named = owner ? ` --tenant ${owner}` : "";
  const form = owner ? ` \\\n  -F tenant=${owner}` : "";
  const push = `export MANYLORA_KEY=…   # ${owner ? "the admin key" : "a key with the scope adapters"}\nmanylora adapter push ./my-adapter --name support --url ${location.origin}${named}`;
  const curl = `curl ${location.origin}/v1/adapters \\\n  -H "Authorization: Bearer $MANYLORA_KEY"${form} \\\n  -F name=support \\\n  -F config=@my-adapter/adapter_config.json \\\n  -F weights=@my-adapter/adapter_model.safetensors`;
  return html`<section class="card first" aria-label="The first adapter">
    <${Empty} title="No adapters yet.">
      <p>Upload the files that PEFT's <code>save_pretrained</code> or mlx-lm wrote. The next request can use the adapter.</p>
      ${may("adapters") && html`<p><${Button} kind="main" onClick=${open}>Upload an adapter<//> or drop its folder on this page.</p>`}
    <//>
    <div class="columns">
      <div><h3>On the command line</h3><${Code} text=${push} label="Upload with manylora" /></div>
      <div><h3>With curl</h3><${Code} text=${curl} label="Upload with curl" /></div>
    </div>
  </section>`;
}
