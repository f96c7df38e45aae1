// The versions of an adapter, with the requests for each and the names that stand for it.
import { html, useMemo, useState } from "../../lib.js";
import { call } from "../../api.js";
import { bytes, compact, count, seconds, shortDigest, time } from "../../format.js";
import { go } from "../../place.js";
import { RangePicker, zoneShown } from "../../range.js";
import { may } from "../../session.js";
import { Badge, Button, Card, Confirm, Copy, Problem, Table } from "../../ui.js";
import { Residency, shareText, sharesOf } from "../../adapter_parts.js";

export function Versions({ it, versions, usage, latency, path, params, change, reload }) {
  const [doomed, setDoomed] = useState(null);
  const rows = useMemo(() => rowsOf(it, versions, usage.data, latency.data), [it, versions, usage.data, latency.data]);
  const zone = zoneShown();
  const isOnly = (row) => row.means === "all";
  const makeCurrent = (row) => change({ aliases: { default: row.version } }, `Requests for ${it.name} use version ${row.version} now.`);
  const columns = [
    { key: "version", label: "Version", isNumber: true, cell: (row) => html`${row.version}${row.report?.warnings.length ? html` <${Badge} tone="warn" title=${row.report.warnings.join(" ")}>!<//>` : ""}` },
    { key: "names", label: "Called by", value: (row) => row.names.length, cell: (row) => row.names.map(({ alias, share }) => html`<${Badge} tone=${alias === "default" ? "info" : ""}>${alias === "default" ? it.name : `@${alias}`}${share < 1 ? ` ${shareText(share)}` : ""}<//> `) },
    { key: "residency", label: "Where", cell: (row) => html`<${Residency} of=${row.residency} />` },
    ...(may("usage") ? [{ key: "requests", label: "Requests", isNumber: true, cell: (row) => (row.requests === undefined ? "–" : compact(row.requests)) },
      { key: "ttft", label: "TTFT p95", isNumber: true, cell: (row) => seconds(row.ttft) }] : []),
    { key: "digest", label: "Digest", cell: (row) => html`<code title=${row.digest}>${shortDigest(row.digest)}</code> <${Copy} text=${row.digest} label="Copy" />` },
    { key: "rank", label: "Rank", isNumber: true },
    { key: "size_bytes", label: "Size", isNumber: true, cell: (row) => bytes(row.size_bytes) },
    { key: "created_at", label: "Created", cell: (row) => time(row.created_at, zone) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, cell: (row) => html`<span class="row-actions">
      ${!isOnly(row) && html`<${Button} kind="small" onClick=${() => makeCurrent(row)}>Make current<//>`}
      <${Button} kind="small danger" aria-label=${`Delete version ${row.version}`} onClick=${() => setDoomed(row)}>Delete<//></span>` }] : []),
  ];
  return html`<${Card} title="Versions" note=${count(rows.length)} actions=${may("usage") && html`<${RangePicker} />`}>
    <${Problem} error=${usage.error} retry=${usage.reload} />
    <${Problem} error=${latency.error} retry=${latency.reload} />
    <${Table} caption="Versions" columns=${columns} rows=${rows} keyOf=${(row) => String(row.version)} sort="-version" />
    ${doomed && html`<${Confirm} title=${`Delete version ${doomed.version}?`} verb="Delete it" onClose=${() => setDoomed(null)}
      act=${async () => {
        await call("DELETE", path, { params: { ...params, version: doomed.version } });
        if (rows.length === 1) go("/adapters");
        else reload();
      }}>${doomText(it, doomed, rows)}<//>`}
  <//>`;
}

function rowsOf(it, versions, usage, latency) {
  const asked = new Map((usage?.data ?? []).map((row) => [row.version, row.requests]));
  const timed = new Map((latency?.data ?? []).map((row) => [row.version, row.ttft_s?.p95 ?? null]));
  const aliases = Object.entries({ default: it.version, ...it.aliases });
  return versions.map((version) => {
    const names = aliases.flatMap(([alias, meaning]) => sharesOf(meaning).filter((one) => one.version === version.version).map(({ share }) => ({ alias, share })));
    const own = names.find(({ alias }) => alias === "default");
    return { ...version, names, means: own ? (own.share === 1 ? "all" : "part") : "none",
      requests: usage && (asked.get(version.version) ?? 0), ttft: timed.get(version.version) ?? null };
  });
}

function doomText(it, doomed, rows) {
  if (rows.length === 1) return html`<p>This is the last version: the adapter <strong>${it.name}</strong> is deleted with it, and so are its aliases and grants.</p>`;
  const names = doomed.names.map(({ alias }) => (alias === "default" ? it.name : `@${alias}`));
  return html`<p>Running requests finish; new ones for <code>${it.name}@${doomed.version}</code> are refused.</p>
    ${names.length > 0 && html`<p><strong>Called by ${names.join(", ")}.</strong> ${doomed.means === "none" ? "These names are deleted with it." : `Choose another version for ${it.name} first.`}</p>`}`;
}
