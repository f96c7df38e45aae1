// The upload of an adapter, which goes on while its window is closed, and the window: the form, the progress and the result.
import { html, signal, useEffect, useMemo, useState } from "./lib.js";
import { ApiError, address, errorOf } from "./api.js";
import { bytes, count, seconds } from "./format.js";
import { Link } from "./place.js";
import { isAdmin, may, useTenantOptions } from "./session.js";
import { Badge, Button, Code, Dialog, Facts, Field, Findings, Problem, Select } from "./ui.js";
import { NAME_RULE, adapterAmong, chosenFiles, isName } from "./upload_files.js";

/**
 * @typedef {{name: string, tenant: string|null, description: string, activate: boolean, config: File, weights: File, key: string}} Draft
 *   `key` is the Idempotency-Key: the same for the same bytes, which can then be sent again safely.
 * @typedef {{draft: Draft, phase: "sending"|"checking"|"done"|"refused"|"lost", sent: number, total: number, bytesPerS: number|null,
 *   error?: ApiError, adapter?: object, isNew?: boolean, cancel: () => void}} Job
 */

/** @type {import("./vendor/signals.js").Signal<Job|null>} */
export const job = signal(null);

export const isUnderWay = () => job.value?.phase === "sending" || job.value?.phase === "checking";

const LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/** ["q_proj", "v_proj"] -> q, v; all seven -> all linear */
export function targetsText(modules) {
  if (LINEAR.every((name) => modules.includes(name))) return "all linear";
  return modules.map((name) => name.replace(/_proj$/, "")).join(", ");
}

const SPEED_MS = 3000;
const LOST =
  "The connection was lost before the server answered, or a file changed since it was chosen. " +
  "Send it again: the same bytes may be sent as often as needed, and become one version.";

/** A new Idempotency-Key. Pages without TLS have no randomUUID. */
const newKey = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Send an adapter; `job` tells how it goes. @param {Draft} draft */
function begin(draft) {
  const request = new XMLHttpRequest(); // fetch tells nothing of what was sent
  const change = (fields) => (job.value = { ...job.value, ...fields });
  const speed = meter();
  job.value = { draft, phase: "sending", sent: 0, total: draft.config.size + draft.weights.size, bytesPerS: null, cancel: () => request.abort() };
  request.upload.onprogress = (event) => change({ sent: event.loaded, total: event.total, bytesPerS: speed(event.loaded) });
  request.upload.onload = (event) => change({ phase: "checking", sent: event.loaded, total: event.loaded });
  request.onerror = () => change({ phase: "lost", error: new ApiError(0, { code: "unreachable", message: LOST }) });
  request.onabort = () => (job.value = null);
  request.onload = async () => {
    const headers = { "x-request-id": request.getResponseHeader("x-request-id") ?? "" };
    const answer = new Response(request.responseText, { status: request.status, headers });
    if (answer.ok) change({ phase: "done", adapter: await answer.json(), isNew: answer.status === 201 });
    else change({ phase: "refused", error: await errorOf(answer) });
  };
  request.open("POST", address("/v1/adapters", { tenant: draft.tenant }));
  request.setRequestHeader("idempotency-key", draft.key);
  request.send(formOf(draft));
}

function formOf({ name, description, activate, config, weights }) {
  const form = new FormData();
  form.append("name", name);
  if (description) form.append("description", description);
  form.append("activate", String(activate));
  form.append("config", config, "adapter_config.json");
  form.append("weights", weights, "adapter_model.safetensors");
  return form;
}

/** Bytes a second over the last seconds. */
function meter() {
  const marks = [];
  return (sent) => {
    const now = performance.now();
    marks.push({ now, sent });
    while (marks.length > 2 && now - marks[0].now > SPEED_MS) marks.shift();
    const passed = now - marks[0].now;
    return passed > 200 ? ((sent - marks[0].sent) / passed) * 1000 : null;
  };
}

addEventListener("beforeunload", (event) => isUnderWay() && event.preventDefault());

/**
 * @param {{given: import("./upload_files.js").Found[], name: string, tenant: string|null, known: object[], isOver: boolean,
 *   onAgain: () => void, onClose: () => void}} props
 *   `given`: files dropped on the page; `name`: the adapter that gets a version; `known`: the adapters that may get one.
 */
export function UploadDialog({ given, name, tenant, known, isOver, onAgain, onClose }) {
  const state = job.value;
  const [round, setRound] = useState(0);
  const again = () => (job.value = null);
  const close = () => {
    if (!isUnderWay()) again();
    onClose();
  };
  const another = () => {
    again();
    onAgain();
    setRound(round + 1);
  };
  const title = state ? TITLES[state.phase](state) : "Upload an adapter";
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
  const [fields, setFields] = useState({ name: givenName, isNamed: givenName !== "", description: "", activate: true, tenant: givenTenant ?? "" });
  const change = (changes) => setFields((before) => ({ ...before, ...changes }));
  const { name, description, activate, tenant } = fields;
  const among = useMemo(() => adapterAmong(found), [found]);
  const { config, weights, problems } = among;
  const key = useMemo(newKey, [name, description, activate, tenant, config, weights]);
  const take = (files) => {
    if (!files.length) return;
    const next = adapterAmong(files).problems.length ? merged(found, files) : files;
    setFound(next);
    if (!fields.isNamed) change({ name: adapterAmong(next).name });
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
    ${isAdmin() && html`<${TenantField} value=${tenant} onChange=${(owner) => change({ tenant: owner })} />`}
    <${Field} label="Name" name="name" value=${name} autocomplete="off" spellcheck=${false}
      onInput=${(event) => change({ name: event.target.value, isNamed: event.target.value !== "" })}
      error=${name && !isName(name) ? NAME_RULE : null}
      hint=${before ? `${name} exists: this becomes its next version, after version ${before.version}.` : "Requests call the adapter by this name, for example support."} />
    <${Field} label="Description (optional)" name="description" maxlength="4096" value=${description} onInput=${(event) => change({ description: event.target.value })} />
    <label class="check"><input type="checkbox" checked=${activate} onChange=${(event) => change({ activate: event.target.checked })} />
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
  const said = (file) => file !== null && html`${file.name} <span class="quiet">${bytes(file.size)}</span>`;
  const left = among.left.length > 0 && html`<span class="quiet">${among.left.slice(0, 4).join(", ")}${among.left.length > 4 ? ` and ${among.left.length - 4} more` : ""}</span>`;
  return html`<fieldset class=${isOver ? "drop-zone over" : "drop-zone"}>
    <legend>Files</legend>
    <p>Drop <code>adapter_config.json</code> and <code>adapter_model.safetensors</code> anywhere on the page, or the folder that holds them.</p>
    <div class="actions">
      <label class="button"><input type="file" class="unseen" name="files" multiple onChange=${choose} />Choose the two files</label>
      <label class="button folder-choice"><input type="file" class="unseen" name="folder" webkitdirectory onChange=${choose} />Choose a folder</label>
    </div>
    ${found.length > 0 && html`<${Facts} aria-live="polite" of=${{ Config: said(among.config), Weights: said(among.weights), "Not sent": left }} />
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
    <${Select} label="Tenant" value=${value} onChange=${onChange} options=${[["", "Choose one"], ...tenants.options]} />`;
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
    return html`<progress aria-label="Check of the upload" /><p role="status">All ${bytes(total)} have arrived. Manylora checks and stores them.</p>`;
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
  const { applied, total } = adapter.applied_modules;
  return html`<p>${state.isNew ? "" : "Nothing new was stored. "}${draft.activate ? html`Requests for <code>${adapter.name}</code> use this version now.` : html`Requests for <code>${adapter.name}</code> use the same version as before.`}</p>
    <${Facts} of=${{
      Version: adapter.version,
      Rank: html`${adapter.rank} <span class="quiet">on ${targetsText(adapter.target_modules)}, ${applied} of ${total} modules</span>`,
      "On the device": html`${adapter.pages === null ? "–" : `${count(adapter.pages)} pages`} <${Badge}>${bytes(adapter.size_bytes)}<//>`,
    }} />
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
