// The parts that pages are made of.
import { html, signal, useEffect, useId, useRef, useState } from "./lib.js";
import { useSending } from "./api.js";

/** The width of a box in pixels, as it is now. */
export function useWidth(box, least = 240) {
  const [width, setWidth] = useState(640);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.max(least, Math.floor(entry.contentRect.width))));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  return width;
}

/** Listen to events of the window while `isOn`, with the listeners that were given when that began. */
export function useWindowEvents(listeners, isOn) {
  useEffect(() => {
    if (!isOn) return undefined;
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
    return () => Object.entries(listeners).forEach(([name, listener]) => removeEventListener(name, listener));
  }, [isOn]);
}

/** A page's heading, what it is about, and its choices. */
export const PageHead = ({ title, about, children }) =>
  html`<div class="page-head"><div><h1>${title}</h1>${about && html`<p class="quiet">${about}</p>`}</div>${children}</div>`;

/** A part of a page under a heading. */
export function Card({ title, note, actions, children, ...rest }) {
  const id = useId();
  return html`<section class="card" aria-labelledby=${title ? id : undefined} ...${rest}>
    ${(title || actions) && html`<header class="card-head">
      <h2 id=${id}>${title}${note && html` <small>${note}</small>`}</h2>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>`}
    ${children}
  </section>`;
}

/** One figure; `change` is a share of the period before (null: there is none, NaN: not known yet), `isGood` whether more is better (null: neither). */
export function Stat({ label, value, hint, change, isGood = null, children }) {
  const tone = !Number.isFinite(change) || isGood === null || Math.abs(change) < 0.005 ? "" : change > 0 === isGood ? "good" : "bad";
  return html`<div class="stat" data-stat=${label}>
    <div class="stat-label">${label}</div>
    <div class="stat-value" title=${hint}>${value}</div>
    ${change !== undefined && html`<div class=${`stat-change ${tone}`}><${Change} share=${change} /></div>`}
    ${children}
  </div>`;
}

function Change({ share }) {
  if (Number.isNaN(share)) return html`\u00a0`; // keeps its line, or the page moves when it arrives
  if (share === null) return html`<span class="quiet">nothing before to compare with</span>`;
  const text = `${share > 0 ? "+" : share < 0 ? "−" : "±"}${Math.abs(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0)}%`;
  return html`<span>${text}</span> <span class="quiet">against the period before</span>`;
}

/** A button; `kind`: "main", "danger" or nothing. An action that takes time is not begun twice. */
export function Button({ kind = "", onClick, disabled, children, ...rest }) {
  const [isBusy, setBusy] = useState(false);
  const act = (event) => {
    const done = onClick?.(event);
    if (!(done instanceof Promise)) return;
    setBusy(true);
    done.finally(() => setBusy(false));
  };
  return html`<button type="button" class=${`button ${kind}`} disabled=${disabled || isBusy} aria-busy=${isBusy} onClick=${act} ...${rest}>
    ${children}
  </button>`;
}

/** A few choices side by side; `options` as for `Select`. */
export const Segmented = ({ label, value, options, onChange }) => html`<div class="segmented" role="group" aria-label=${label}>
  ${options.map(([one, name]) => html`<button type="button" key=${one} aria-pressed=${one === value} onClick=${() => onChange(one)}>${name}</button>`)}
</div>`;

/** A labelled input with its hint and what is wrong with it. */
export function Field({ label, hint, error, children, ...rest }) {
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${children ? children(id) : html`<input id=${id} aria-describedby=${hint || error ? `${id}-hint` : undefined} aria-invalid=${error ? "true" : undefined} ...${rest} />`}
    ${(hint || error) && html`<p id=${`${id}-hint`} class=${error ? "field-error" : "field-hint"}>${error || hint}</p>`}
  </div>`;
}

/** A choice of one of `options`, pairs of a value and its label; values are texts. */
export const Select = ({ label, value, options, onChange, hideLabel = false }) => html`<${Field} label=${html`<span class=${hideLabel ? "unseen" : ""}>${label}</span>`}>
  ${(id) => html`<select id=${id} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map(([one, name]) => html`<option key=${one} value=${one} selected=${one === value}>${name}</option>`)}
  </select>`}
<//>`;

/** A word in a frame; `tone`: "good", "bad", "warn", "info" or nothing. */
export const Badge = ({ tone = "", children, ...rest }) => html`<span class=${`badge ${tone}`} ...${rest}>${children}</span>`;

const PLACES = {
  device: { tone: "good", title: "On the device: the next request starts at once." },
  loading: { tone: "warn", title: "On its way to the device." },
  host: { tone: "info", title: "In host memory: the next request copies it to the device first." },
  stored: { tone: "", title: "Only in the blob store: the next request loads it first." },
};

/** Where an adapter is. */
export const Residency = ({ of: place }) => html`<${Badge} tone=${PLACES[place].tone} title=${PLACES[place].title} data-residency=${place}>${place}<//>`;

/** Shown where there is nothing yet, with what to do about it. */
export const Empty = ({ title, children }) => html`<div class="empty"><p class="empty-title">${title}</p>${children && html`<div>${children}</div>`}</div>`;

/** What went wrong and what to do. @param {{error: import("./api.js").ApiError, retry?: () => void}} props */
export function Problem({ error, retry }) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <p>${error.message}</p>
    ${error.findings?.length > 1 && html`<${Findings} findings=${error.findings} />`}
    <p class="quiet">
      ${error.code}${error.requestId && error.status >= 500 && html` · request <code>${error.requestId}</code>, by which the server's log tells more`}
    </p>
    ${retry && html`<${Button} onClick=${retry}>Try again<//>`}
  </div>`;
}

/** The first problem of several answers; "Try again" asks for all of them again. */
export function FirstProblem({ of: answers }) {
  const failed = answers.find((answer) => answer.error);
  return failed && html`<${Problem} error=${failed.error} retry=${() => answers.forEach((answer) => answer.reload())} />`;
}

/** A numbered report of what is wrong with an upload. */
export const Findings = ({ findings }) => html`<ol class="findings">
  ${findings.map((finding) => html`<li>
    <p>${finding.message}</p>
    ${finding.hint && html`<p class="hint"><strong>Hint:</strong> ${finding.hint}</p>`}
    ${finding.param && html`<p class="quiet"><code>${finding.param}</code></p>`}
  </li>`)}
</ol>`;

/** Grey lines while something is read. */
export const Skeleton = ({ lines = 3 }) => html`<div class="skeleton" aria-busy="true" aria-label="Loading">${Array.from({ length: lines }, () => html`<span />`)}</div>`;

/** Data that is being read: a problem, grey lines, or the page. What is shown stays until newer data is here. With
 * `isQuiet` the page shows problems elsewhere. */
export function Loaded({ of: answer, lines = 4, isQuiet = false, children }) {
  const problem = answer.error && !isQuiet && html`<${Problem} error=${answer.error} retry=${answer.reload} />`;
  if (answer.data === undefined) return answer.error ? problem : html`<${Skeleton} lines=${lines} />`;
  return html`${problem}<div class=${answer.isStale ? "stale" : ""} aria-busy=${answer.isLoading}>${children(answer.data, answer.about)}</div>`;
}

const REFUSED = { usage: "This key may not see usage.", infer: "This key may not send requests." };

/** In place of a page that a key may not see. @param {{scope: string}} props */
export const LacksScope = ({ scope }) =>
  html`<${Card}><${Empty} title=${REFUSED[scope]}>The key lacks the scope <code>${scope}</code>. Sign in with a key that has it, or ask your admin for one: <code>manylora key create --scope ${scope}</code>.<//><//>`;

/** The same beside what the key may see. @param {{scope: string, says: string}} props */
export const LacksScopeNote = ({ scope, says }) => html`<p class="quiet">${says}: this key lacks the scope <code>${scope}</code>.</p>`;

/** Names and values; a value that is false leaves its name out. @param {{of: Record<string, unknown>}} props */
export const Facts = ({ of: facts, ...rest }) => html`<dl class="facts" ...${rest}>
  ${Object.entries(facts).map(([name, value]) => value !== false && html`<dt>${name}</dt><dd data-fact=${name}>${value}</dd>`)}
</dl>`;

/** A table's column of numbers, with "–" where there is none. */
export const numbers = (key, label, format, value = (row) => row[key]) =>
  ({ key, label, isNumber: true, value, cell: (row) => (value(row) === null || value(row) === undefined ? "–" : format(value(row))) });

/**
 * A table that can be sorted by its heads. Numbers stand right.
 * @param {{columns: {key: string, label: string, isNumber?: boolean, cell?: (row: object) => unknown, value?: (row: object) => unknown}[],
 *   rows: object[], keyOf: (row: object) => string, totals?: object, caption: string, empty?: unknown,
 *   others?: (rows: object[]) => object, sort?: string, onSort?: (sort: string) => void, first?: number}} props `sort` is
 *   a key, with "-" in front for the largest first; without `onSort` the table keeps it to itself. `first` rows are shown
 *   before "show more"; `others` makes one row of those that are not shown. `empty` is shown in place of a table without rows.
 *   `totals` is a row with the sums of the columns of numbers.
 */
export function Table({ columns, rows, keyOf, totals, others, caption, empty, sort: given, onSort, first = 50 }) {
  const [own, setOwn] = useState(given ?? "");
  const [shown, setShown] = useState(first);
  const sort = onSort ? given ?? "" : own;
  const key = sort.replace(/^-/, "");
  const direction = sort.startsWith("-") ? "descending" : "ascending";
  const sorted = sortedBy(rows, columns.find((one) => one.key === key), direction === "descending");
  const cells = (cellOf) => columns.map((column, index) => html`<td class=${column.isNumber ? "number" : ""} data-column=${column.key}>${cellOf(column, index)}</td>`);
  const cellsOf = (row) => cells((column) => (column.cell ? column.cell(row) : row[column.key] ?? "–"));
  const totalOf = (column) => (column.isNumber && column.value(totals) !== undefined ? column.cell(totals) : "");
  const rest = others && sorted.length > shown ? others(sorted.slice(shown)) : null;
  const turn = (column) => {
    const next = sort === `-${column.key}` ? column.key : sort === column.key ? `-${column.key}` : `${column.isNumber ? "-" : ""}${column.key}`;
    (onSort ?? setOwn)(next);
  };
  if (empty && !rows.length) return empty;
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${caption}>
      <table>
        <caption class="unseen">${caption}</caption>
        <thead><tr>
          ${columns.map((column) => html`<th key=${column.key} scope="col" class=${column.isNumber ? "number" : ""} aria-sort=${key === column.key ? direction : undefined}>
            ${column.isFixed ? column.label : html`<button type="button" class="sort" onClick=${() => turn(column)}>${column.label}</button>`}
          </th>`)}
        </tr></thead>
        <tbody>
          ${sorted.slice(0, shown).map((row) => html`<tr key=${keyOf(row)} data-key=${keyOf(row)}>${cellsOf(row)}</tr>`)}
        </tbody>
        ${rest && html`<tfoot><tr>${cellsOf(rest)}</tr></tfoot>`}
        ${totals && html`<tfoot><tr>${cells((column, index) => (index === 0 ? "Total" : totalOf(column)))}</tr></tfoot>`}
      </table>
    </div>
    ${sorted.length > shown && html`<p class="more"><${Button} onClick=${() => setShown(shown + 200)}>Show more<//> <span class="quiet">${shown} of ${sorted.length} shown</span></p>`}`;
}

const order = new Intl.Collator("en", { numeric: true });

function sortedBy(rows, column, isDescending) {
  if (!column) return rows;
  const valueOf = column.value ?? ((row) => row[column.key]);
  return rows
    .map((row) => ({ row, value: valueOf(row) ?? null }))
    .sort(({ value: x }, { value: y }) => {
      if (x === null || y === null) return (x === null) - (y === null); // unknown values come last in either order
      const result = typeof x === "number" && typeof y === "number" ? x - y : order.compare(String(x), String(y));
      return isDescending ? -result : result;
    })
    .map(({ row }) => row);
}

const opened = signal(null);

/** Show a window over the page: a component that also takes `onClose`. */
export function openDialog(Window, props) {
  const close = () => opened.value === shown && (opened.value = null);
  const shown = html`<${Window} ...${props} onClose=${close} />`;
  opened.value = shown;
}

/** Where that window is shown; it goes with the page at `path`. */
export function OpenDialog({ path }) {
  useEffect(() => () => (opened.value = null), [path]);
  return opened.value;
}

/** A window over the page; Escape and the cross close it. */
export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  const isGone = useRef(false);
  const id = useId();
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => {
      isGone.current = true; // no `onClose` where the page itself removes the window
      dialog.close();
    };
  }, []);
  return html`<dialog ref=${box} class="dialog" aria-labelledby=${id} onClose=${() => isGone.current || onClose()} onClick=${(event) => event.target === box.current && onClose()}>
    <div class="dialog-body">
      <header class="card-head"><h2 id=${id}>${title}</h2>
        <button type="button" class="icon-button" aria-label="Close" onClick=${onClose}>×</button></header>
      ${children}
    </div>
  </dialog>`;
}

/** A window for one change. `act` may throw an ApiError, which is shown; when it is done the window closes.
 * The button does nothing before `isReady`. */
export function ChangeDialog({ title, children, verb, act, onClose, isReady = true, kind = "main" }) {
  const { error, send } = useSending();
  const change = async () => (await send(act)) && onClose();
  return html`<${Dialog} title=${title} onClose=${onClose}>
    ${children}
    <${Problem} error=${error} />
    <div class="actions end"><${Button} onClick=${onClose}>Cancel<//><${Button} kind=${kind} disabled=${!isReady} onClick=${change}>${verb}<//></div>
  <//>`;
}

/** Asks before what cannot be undone. */
export const Confirm = ({ children, ...rest }) => html`<${ChangeDialog} kind="danger" ...${rest}><div>${children}</div><//>`;

/** Ask so: `text` tells what `act` changes. */
export const confirm = (title, verb, act, text) => openDialog(Confirm, { title, verb, act, children: text });

/** A button that copies a text. */
export function Copy({ text, label = "Copy" }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await copyText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="button small" onClick=${copy} aria-live="polite">${isDone ? "Copied" : label}</button>`;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // without TLS browsers have no clipboard for pages
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  return undefined;
}

/** A text with a button that copies it, to be taken as it is. */
export const Code = ({ text, label }) => html`<div class="code"><pre tabindex="0" aria-label=${label}>${text}</pre><${Copy} text=${text} /></div>`;

const notes = signal([]);

/** Show a message for a few seconds. */
export function say(text) {
  const note = { text };
  notes.value = [...notes.value, note];
  setTimeout(() => (notes.value = notes.value.filter((one) => one !== note)), 4000);
}

/** Where those messages are shown. */
export const Notes = () => html`<div class="notes" role="status" aria-live="polite">${notes.value.map((note) => html`<p>${note.text}</p>`)}</div>`;
