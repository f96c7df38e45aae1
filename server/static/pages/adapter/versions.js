// The versions of an adapter, how its requests are divided among them, and the names that stand for them.
import { html, useState } from "../../lib.js";
import { call } from "../../api.js";
import { bytes, compact, count, seconds, shortDigest } from "../../format.js";
import { go } from "../../place.js";
import { RangePicker, timeShown } from "../../range.js";
import { may } from "../../session.js";
import { Badge, Button, Card, Copy, Empty, Field, FirstProblem, Residency, Select, Table, confirm, numbers } from "../../ui.js";
import { ShareBar } from "../../charts.js";
import { isName } from "../../upload_files.js";

/** The versions that an alias stands for, with their shares: {2: 95, 3: 5} -> [{version: 2, weight: 95, share: 0.95}, …],
 * the largest first. One version alone has a weight of 100. */
function sharesOf(meaning) {
  const weights = typeof meaning === "number" ? { [meaning]: 100 } : meaning;
  const sum = Object.values(weights).reduce((a, b) => a + b, 0);
  return Object.entries(weights)
    .map(([version, weight]) => ({ version: Number(version), weight, share: weight / sum }))
    .sort((a, b) => b.weight - a.weight || b.version - a.version);
}

/** 0.95 -> 95%, 0.005 -> 0.5% */
const shareText = (share) => `${Number((share * 100).toFixed(share < 0.1 ? 2 : 1))}%`;

/** What an alias means, in words. */
export function meaningText(meaning) {
  const shares = sharesOf(meaning);
  if (shares.length === 1) return `version ${shares[0].version}`;
  return shares.map(({ version, share }) => `${shareText(share)} version ${version}`).join(", ");
}

/** The options of a `Select` among versions. */
export const versionOptions = (versions) => versions.map(({ version }) => [String(version), `Version ${version}`]);

/** The class that gives a version its colour. */
export const versionColour = ({ version }) => `s${(version - 1) % 8}`;

export function Versions({ it, versions, usage, latency, path, params, change, reload }) {
  const rows = rowsOf(it, versions, usage.data, latency.data);
  const remove = async (version) => {
    await call("DELETE", path, { params: { ...params, version } });
    if (rows.length === 1) go("/adapters");
    else reload();
  };
  const askRemove = (row) => confirm(`Delete version ${row.version}?`, "Delete it", () => remove(row.version), doomText(it, row, rows));
  const columns = [
    { key: "version", label: "Version", isNumber: true, cell: (row) => html`${row.version}${row.report?.warnings.length ? html` <${Badge} tone="warn" title=${row.report.warnings.join(" ")}>!<//>` : ""}` },
    { key: "names", label: "Called by", value: (row) => row.names.length, cell: (row) => row.names.map(({ alias, share }) => html`<${Badge} tone=${alias === "default" ? "info" : ""}>${alias === "default" ? it.name : `@${alias}`}${share < 1 ? ` ${shareText(share)}` : ""}<//> `) },
    { key: "residency", label: "Where", cell: (row) => html`<${Residency} of=${row.residency} />` },
    ...(may("usage") ? [numbers("requests", "Requests", compact), numbers("ttft", "TTFT p95", seconds)] : []),
    { key: "digest", label: "Digest", cell: (row) => html`<code title=${row.digest}>${shortDigest(row.digest)}</code> <${Copy} text=${row.digest} label="Copy" />` },
    numbers("rank", "Rank", count),
    numbers("size_bytes", "Size", bytes),
    { key: "created_at", label: "Created", cell: (row) => timeShown(row.created_at) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, cell: (row) => html`<span class="row-actions">
      ${row.share < 1 && html`<${Button} kind="small" onClick=${() => change({ aliases: { default: row.version } }, `Requests for ${it.name} use version ${row.version} now.`)}>Make current<//>`}
      <${Button} kind="small danger" aria-label=${`Delete version ${row.version}`} onClick=${() => askRemove(row)}>Delete<//></span>` }] : []),
  ];
  return html`<${Card} title="Versions" note=${count(rows.length)} actions=${may("usage") && html`<${RangePicker} />`}>
    <${FirstProblem} of=${[usage, latency]} />
    <${Table} caption="Versions" columns=${columns} rows=${rows} keyOf=${(row) => String(row.version)} sort="-version" />
  <//>`;
}

function rowsOf(it, versions, usage, latency) {
  const asked = new Map((usage?.data ?? []).map((row) => [row.version, row.requests]));
  const timed = new Map((latency?.data ?? []).map((row) => [row.version, row.ttft_s?.p95]));
  const aliases = Object.entries({ default: it.version, ...it.aliases });
  return versions.map((version) => {
    const names = aliases.flatMap(([alias, meaning]) => sharesOf(meaning).filter((one) => one.version === version.version).map(({ share }) => ({ alias, share })));
    const share = names.find(({ alias }) => alias === "default")?.share ?? 0;
    return { ...version, names, share, requests: usage && (asked.get(version.version) ?? 0), ttft: timed.get(version.version) };
  });
}

function doomText(it, doomed, rows) {
  if (rows.length === 1) return html`<p>This is the last version: the adapter <strong>${it.name}</strong> is deleted with it, and so are its aliases and grants.</p>`;
  const names = doomed.names.map(({ alias }) => (alias === "default" ? it.name : `@${alias}`));
  return html`<p>Running requests finish; new ones for <code>${it.name}@${doomed.version}</code> are refused.</p>
    ${names.length > 0 && html`<p><strong>Called by ${names.join(", ")}.</strong> ${doomed.share === 0 ? "These names are deleted with it." : `Choose another version for ${it.name} first.`}</p>`}`;
}

const MOST_SHARES = 8;
const MOST_WEIGHT = 10_000;

/** How the requests for an adapter are divided among its versions. */
export function Canary({ it, versions, change }) {
  const before = sharesOf(it.aliases.default ?? it.version);
  const [parts, setParts] = useState(before);
  const known = [...versions].sort((a, b) => b.version - a.version);
  const free = known.filter(({ version }) => !parts.some((one) => one.version === version));
  const meaning = meaningOf(parts);
  const isChanged = JSON.stringify(meaning) !== JSON.stringify(meaningOf(before));
  const isValid = parts.every(({ weight }) => Number.isInteger(weight) && weight >= 0 && weight <= MOST_WEIGHT) && parts.some(({ weight }) => weight > 0);
  const set = (version, weight) => setParts(parts.map((one) => (one.version === version ? { ...one, weight } : one)));
  const add = (version) => setParts([...parts.map((one) => ({ ...one, weight: parts.length === 1 ? 95 : one.weight })), { version, weight: 5 }]);
  const back = rollback(before, known);
  const apply = (to) => change({ aliases: { default: to } }, `Requests for ${it.name} use ${meaningText(to)} now.`);
  return html`<${Card} title="Split of requests" note=${`for ${it.name}, among its versions`}>
    <${Preview} parts=${isValid ? parts : before} />
    ${may("adapters") && (known.length > 1
      ? html`<div class="parts">${parts.map((one) => html`<div class="part" key=${one.version}>
            <label class="field"><span>Weight of version ${one.version}</span>
              <input type="number" min="0" max=${MOST_WEIGHT} step="1" value=${one.weight} onInput=${(event) => set(one.version, event.target.valueAsNumber)} /></label>
            ${parts.length > 1 && html`<${Button} kind="small" aria-label=${`Leave version ${one.version} out`} onClick=${() => setParts(parts.filter((other) => other !== one))}>Leave out<//>`}
          </div>`)}
          ${parts.length === 2 && html`<label class="field slider"><span>Slide from version ${parts[0].version} to version ${parts[1].version}</span>
            <input type="range" min="0" max="100" step="1" value=${Math.round((shareOf(parts[1], parts) || 0) * 100)}
              onInput=${(event) => setParts([{ ...parts[0], weight: 100 - event.target.valueAsNumber }, { ...parts[1], weight: event.target.valueAsNumber }])} /></label>`}
          ${free.length > 0 && parts.length < MOST_SHARES && html`<${Select} label="Add a version" value="" onChange=${(version) => version && add(Number(version))}
            options=${[["", "Choose a version"], ...versionOptions(free)]} />`}
        </div>
        ${!isValid && html`<p class="field-error">Weights are whole numbers from 0 to ${MOST_WEIGHT}, at least one above 0.</p>`}
        <div class="actions">
          <${Button} kind="main" disabled=${!isChanged || !isValid} onClick=${() => apply(meaning)}>Apply${isChanged && isValid ? `: ${splitText(parts)}` : ""}<//>
          ${isChanged && html`<${Button} onClick=${() => setParts(before)}>Reset<//>`}
          ${back && html`<${Button} onClick=${() => apply(back.version)}>${back.label}<//>`}
        </div>`
      : html`<p class="quiet">There is only one version. Upload another one without making it current; then you can send it a part of the requests here.</p>`)}
  <//>`;
}

function Preview({ parts }) {
  const shown = parts.filter(({ weight }) => weight > 0);
  const shares = shown.map((one) => ({ key: String(one.version), label: `Version ${one.version}`, colour: versionColour(one), value: one.weight }));
  return html`<${ShareBar} label="Share of the requests" parts=${shares} format=${(_, share) => shareText(share)} />
    <p class="unseen" data-split>${splitText(parts)}</p>`;
}

/** "95% / 5%" */
const splitText = (parts) => parts.filter(({ weight }) => weight > 0).map((one) => shareText(shareOf(one, parts))).join(" / ");

const shareOf = (one, parts) => one.weight / parts.reduce((sum, { weight }) => sum + weight, 0);

/** What PATCH takes: a version, or weights by version. */
function meaningOf(parts) {
  const given = parts.filter(({ weight }) => weight > 0).sort((a, b) => a.version - b.version);
  return given.length === 1 ? given[0].version : Object.fromEntries(given.map(({ version, weight }) => [version, weight]));
}

/** What “roll back” means: from several versions to the one with most requests, from one version to the one before it. */
function rollback(before, known) {
  const [{ version: main }] = before;
  if (before.length > 1) return { version: main, label: `Roll back to version ${main} alone` };
  const older = known.find(({ version }) => version < main);
  return older && { version: older.version, label: `Roll back to version ${older.version}` };
}

/** Names that stand for versions. */
export function Aliases({ it, versions, change }) {
  const [alias, setAlias] = useState("");
  const [version, setVersion] = useState("");
  const rows = Object.entries(it.aliases).filter(([name]) => name !== "default").map(([name, meaning]) => ({ name, meaning }));
  const options = versionOptions(versions);
  const isGood = isName(alias) && !/^\d+$/.test(alias) && alias !== "default";
  const point = (name, to) => change({ aliases: { [name]: Number(to) } }, `${it.name}@${name} is version ${to} now.`);
  const add = async (event) => {
    event.preventDefault();
    if (isGood && (await point(alias, version || options[0][0]))) setAlias("");
  };
  const askRemove = (name) => confirm(`Remove the alias ${name}?`, "Remove it", () => change({ aliases: { [name]: null } }, `${it.name}@${name} was removed.`),
    html`<p>Requests for <code>${it.name}@${name}</code> are refused from then on. The version stays.</p>`);
  const choice = ({ name, meaning }) => html`<${Select} label=${`Version of ${name}`} hideLabel value=${typeof meaning === "number" ? String(meaning) : ""} onChange=${(to) => to && point(name, to)}
    options=${[...(typeof meaning === "number" ? [] : [["", meaningText(meaning)]]), ...options]} />`;
  const columns = [
    { key: "alias", label: "Called as", isFixed: true, cell: ({ name }) => html`<code>${it.name}@${name}</code>` },
    { key: "meaning", label: "Version", isFixed: true, cell: (row) => (may("adapters") ? choice(row) : meaningText(row.meaning)) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, isNumber: true, cell: ({ name }) => html`<${Button} kind="small danger" aria-label=${`Remove the alias ${name}`} onClick=${() => askRemove(name)}>Remove<//>` }] : []),
  ];
  return html`<${Card} title="Aliases" note="names that stay when versions change">
    <${Table} caption="Aliases" columns=${columns} rows=${rows} keyOf=${(row) => row.name}
      empty=${html`<${Empty} title="No aliases yet.">An alias such as <code>${it.name}@prod</code> stands for a version until you change it.<//>`} />
    ${may("adapters") && html`<form class="inline-form" onSubmit=${add}>
      <${Field} label="New alias" name="alias" placeholder="prod" autocomplete="off" value=${alias} onInput=${(event) => setAlias(event.target.value)}
        error=${alias && !isGood ? "A lower-case name, not a number, and not “default”." : null} />
      <${Select} label="Version" value=${version || options[0]?.[0]} onChange=${setVersion} options=${options} />
      <${Button} type="submit" disabled=${!isGood}>Add<//>
    </form>`}
  <//>`;
}
