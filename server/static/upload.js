// The window in which an adapter is uploaded: the form, the progress and the result.
import { html, useEffect, useMemo, useState } from "./lib.js";
import { bytes, count, seconds } from "./format.js";
import { Link } from "./place.js";
import { isAdmin, may, useTenantOptions } from "./session.js";
import { Badge, Button, Code, Dialog, Field, Findings, Problem } from "./ui.js";
import { targetsText } from "./adapter_parts.js";
import { NAME_RULE, adapterAmong, chosenFiles, isName } from "./upload_files.js";
import { begin, isUnderWay, job, newKey } from "./upload_job.js";

/**
 * @param {{given: import("./upload_files.js").Found[], name: string, tenant: string|null, known: object[], isOver: boolean,
 *   onAgain: () => void, onClose: () => void}} props
 *   `given` was dropped on the page; `name` of the adapter that gets a version; `known` adapters, whose next versions these may be.
 */
export function UploadDialog({ given, name, tenant, known, isOver, onAgain, onClose }) {
  const state = job.value;
  const [round, setRound] = useState(0);
  const close = () => {
    if (!isUnderWay()) job.value = null;
    onClose();
  };
  const again = () => (job.value = null);
  const another = () => {
    again();
    onAgain();
    setRound(round + 1);
  };
  const title = !state ? "Upload an adapter" : TITLES[state.phase](state);
  // The form is kept during the upload: its content can be corrected and sent again.
  return html`<${Dialog} title=${title} onClose=${close}>
    <div hidden=${state !== null}><${DraftForm} key=${round} given=${given} givenName=${name} tenant=${tenant} known=${known} isOver=${isOver} /></div>
    ${state && html`<div class="upload-state" data-phase=${state.phase}>${state.phase === "done" ? html`<${Done} state=${state} again=${another} onClose=${close} />` : html`<${OnTheWay} state=${state} again=${again} onClose=${close} />`}</div>`}
  <//>`;
}

const TITLES = {
  sending: ({ draft }) => `Sending ${draft.name}`,
  checking: ({ draft }) => `Checking ${draft.name}`,
  done: ({ adapter, isNew }) => (isNew ? `${adapter.name} version ${adapter.version} is ready` : `${adapter.name} has these files already`),
  refused: ({ draft }) => `${draft.name} was refused`,
  lost: ({ draft }) => `${draft.name} did not arrive`,
};

function DraftForm({ given, givenName, tenant: givenTenant, known, isOver }) {
  const [found, setFound] = useState([]);
  const [name, setName] = useState(givenName);
  const [isNamed, setNamed] = useState(givenName !== "");
  const [description, setDescription] = useState("");
  const [activate, setActivate] = useState(true);
  const [tenant, setTenant] = useState(givenTenant ?? "");
  const among = useMemo(() => adapterAmong(found), [found]);
  const { config, weights, problems } = among;
  const key = useMemo(newKey, [name, description, activate, tenant, config, weights]);
  const take = (files) => {
    if (!files.length) return;
    const next = adapterAmong(files).problems.length ? merged(found, files) : files;
    setFound(next);
    if (!isNamed) setName(adapterAmong(next).name);
  };
  useEffect(() => take(given), [given]);
  const missing = [...(config && weights && !problems.length ? [] : ["the two files"]), ...(isName(name) ? [] : [name ? "a name that can be used" : "a name"]),
    ...(isAdmin() && !tenant ? ["the tenant"] : [])];
  const submit = (event) => {
    event.preventDefault();
    if (!missing.length) begin({ name, description, activate, tenant: isAdmin() ? tenant : null, config, weights, key });
  };
  const before = known.find((one) => one.name === name && (!isAdmin() || one.tenant === tenant));
  return html`<form class="upload" onSubmit=${submit}>
    <${Files} found=${found} among=${among} isOver=${isOver} take=${take} clear=${() => setFound([])} />
    ${isAdmin() && html`<${TenantField} value=${tenant} onChange=${setTenant} />`}
    <${Field} label="Name" name="name" value=${name} autocomplete="off" spellcheck=${false}
      onInput=${(event) => (setName(event.target.value), setNamed(event.target.value !== ""))}
      error=${name && !isName(name) ? NAME_RULE : null}
      hint=${before ? `${name} exists: this becomes its next version, after version ${before.version}.` : "Requests call the adapter by this name, for example support."} />
    <${Field} label="Description (optional)" name="description" maxlength="4096" value=${description} onInput=${(event) => setDescription(event.target.value)} />
    <label class="check"><input type="checkbox" checked=${activate} onChange=${(event) => setActivate(event.target.checked)} />
      <span>Make it the current version<br /><span class="quiet">Requests for <code>${isName(name) ? name : "name"}</code> use this version as soon as it is stored. If you leave this out, they use the version they use now, and this one is called <code>${isName(name) ? name : "name"}@version</code>.</span></span></label>
    <div class="actions end">
      ${missing.length > 0 && html`<span class="quiet">Missing: ${missing.join(", ")}</span>`}
      <${Button} kind="main" type="submit" disabled=${missing.length > 0}>Upload<//>
    </div>
  </form>`;
}

function Files({ found, among, isOver, take, clear }) {
  const choose = (event) => {
    take(chosenFiles(event.target));
    event.target.value = ""; // else the browser ignores the same files when they are chosen again
  };
  const sent = [["Config", among.config], ["Weights", among.weights]].filter(([, file]) => file);
  return html`<fieldset class=${isOver ? "drop-zone over" : "drop-zone"}>
    <legend>Files</legend>
    <p>Drop <code>adapter_config.json</code> and <code>adapter_model.safetensors</code> anywhere on the page, or the folder that holds them.</p>
    <div class="actions">
      <label class="button"><input type="file" class="unseen" name="files" multiple onChange=${choose} />Choose the two files</label>
      <label class="button folder-choice"><input type="file" class="unseen" name="folder" webkitdirectory onChange=${choose} />Choose a folder</label>
    </div>
    ${found.length > 0 &&
    html`<dl class="facts" aria-live="polite">
      ${sent.map(([label, file]) => html`<dt>${label}</dt><dd>${file.name} <span class="quiet">${bytes(file.size)}</span></dd>`)}
      ${among.left.length > 0 && html`<dt>Not sent</dt><dd class="quiet">${among.left.slice(0, 4).join(", ")}${among.left.length > 4 ? ` and ${among.left.length - 4} more` : ""}</dd>`}
    </dl>
    ${among.problems.length > 0 && html`<div class="problem" role="alert"><${Findings} findings=${among.problems} /></div>`}
    <${Button} kind="small" onClick=${clear}>Clear<//>`}
  </fieldset>`;
}

/** New files beside those that were there, of which a new one of the same name takes the place. */
const merged = (before, files) => [...before.filter((old) => !files.some((one) => one.path === old.path)), ...files];

function TenantField({ value, onChange }) {
  const tenants = useTenantOptions(value);
  return html`<${Problem} error=${tenants.error} retry=${tenants.reload} />
    ${tenants.data && !tenants.options.length && html`<p class="warning">An adapter belongs to a tenant, and there is no tenant yet. <${Link} to="/tenants">Make one<//> first.</p>`}
    <${Field} label="Tenant">${(id) => html`<select id=${id} name="tenant" value=${value} onChange=${(event) => onChange(event.target.value)}>
      <option value="">Choose one</option>
      ${tenants.options.map((one) => html`<option key=${one.value} value=${one.value} selected=${one.value === value}>${one.label}</option>`)}
    </select>`}<//>`;
}

function OnTheWay({ state, again, onClose }) {
  const { phase, draft, error } = state;
  if (phase === "sending" || phase === "checking") {
    return html`<${Progress} state=${state} />
      <p class="quiet">You can close this window and use other pages; the upload goes on.</p>
      <div class="actions end">
        ${phase === "sending" && html`<${Button} kind="danger" onClick=${state.cancel}>Cancel the upload<//>`}
        <${Button} onClick=${onClose}>Close<//>
      </div>`;
  }
  const findings = error.findings;
  return html`${findings.length
      ? html`<div class="problem" role="alert"><p>${findings.length === 1 ? "One thing is" : `${findings.length} things are`} wrong with it. Nothing was stored.</p><${Findings} findings=${findings} /></div>`
      : html`<${Problem} error=${error} />`}
    <div class="actions end">
      <${Button} onClick=${again}>${phase === "lost" ? "Change it" : "Change it and send again"}<//>
      ${(phase === "lost" || error.status === 409 || error.status >= 429) && html`<${Button} kind="main" onClick=${() => begin(draft)}>Send it again<//>`}
    </div>`;
}

/** How far an upload is; screen readers get it too. */
function Progress({ state }) {
  const { phase, sent, total, bytesPerS } = state;
  if (phase === "checking") {
    return html`<progress aria-label="Check of the upload" /><p role="status">All ${bytes(total)} have arrived. Weft checks and stores them.</p>`;
  }
  const left = bytesPerS ? `, about ${seconds(Math.max(1, Math.round((total - sent) / bytesPerS)))} left` : "";
  return html`<progress aria-label="Upload" max=${total} value=${sent} />
    <p data-sent=${sent}>${bytes(sent)} of ${bytes(total)}${bytesPerS ? ` · ${bytes(Math.round(bytesPerS))}/s` : ""}${left}</p>`;
}

function Done({ state, again, onClose }) {
  const { adapter, draft } = state;
  const own = { tenant: isAdmin() ? adapter.tenant : undefined };
  const model = draft.activate ? adapter.name : `${adapter.name}@${adapter.version}`;
  const warnings = adapter.report?.warnings ?? [];
  const applied = adapter.applied_modules;
  return html`<p>${state.isNew ? "" : "Nothing new was stored. "}${draft.activate ? html`Requests for <code>${adapter.name}</code> use this version now.` : html`Requests for <code>${adapter.name}</code> use the same version as before.`}</p>
    <dl class="facts">
      <dt>Version</dt><dd>${adapter.version}</dd>
      <dt>Rank</dt><dd>${adapter.rank} <span class="quiet">on ${targetsText(adapter.target_modules)}, ${applied.applied} of ${applied.total} modules</span></dd>
      <dt>On the device</dt><dd>${adapter.pages === null ? "–" : `${count(adapter.pages)} pages`} <${Badge}>${bytes(adapter.size_bytes)}<//></dd>
    </dl>
    ${warnings.length > 0 && html`<div class="warning" role="note"><p><strong>Warnings (the adapter is served):</strong></p><ul>${warnings.map((warning) => html`<li>${warning}</li>`)}</ul></div>`}
    <p>Call it as</p>
    <${Code} text=${`model="${model}"`} label="How requests name it" />
    <div class="actions end">
      <${Button} onClick=${again}>Upload another<//>
      <${Link} class="button" to=${`/adapters/${encodeURIComponent(adapter.name)}`} params=${own} onClickCapture=${() => (job.value = null)}>Open it<//>
      ${may("infer") ? html`<${Link} class="button main" to="/playground" params=${{ ...own, model }} onClickCapture=${() => (job.value = null)}>Try it<//>` : html`<${Button} kind="main" onClick=${onClose}>Done<//>`}
    </div>`;
}

/** A line on the page while the window is closed. */
export function UploadStrip({ onOpen }) {
  const state = job.value;
  if (!state) return null;
  return html`<section class="card upload-strip" aria-label="Upload">
    <strong>${TITLES[state.phase](state)}</strong>
    ${isUnderWay() && html`<div class="strip-progress"><${Progress} state=${state} /></div>`}
    <${Button} kind="small" onClick=${onOpen}>Show<//>
  </section>`;
}
