// A filter with several values: a button that opens a list with a search field, usable by keyboard.
import { html, useEffect, useId, useRef, useState } from "./lib.js";
import { count } from "./format.js";
import { Problem } from "./ui.js";

const MOST = 200;

/**
 * @param {{label: string, chosen: string[], onChange: (chosen: string[]) => void, isSingle?: boolean,
 *   nameOf?: (value: string) => string, useOptions: (isOpen: boolean) => {options: {value: string, label: string, requests: number}[]|undefined,
 *   error: import("./api.js").ApiError|null}}} props `useOptions` is a hook that is called only while the list is open.
 */
export function Filter({ label, chosen, onChange, useOptions, nameOf = (value) => value, isSingle = false }) {
  const [isOpen, setOpen] = useState(false);
  const box = useRef(null);
  const opener = useRef(null);
  const id = useId();
  useEffect(() => {
    if (!isOpen) return undefined;
    const leave = (event) => box.current?.contains(event.target) || setOpen(false);
    addEventListener("pointerdown", leave);
    addEventListener("focusin", leave);
    return () => {
      removeEventListener("pointerdown", leave);
      removeEventListener("focusin", leave);
    };
  }, [isOpen]);
  const close = (event) => {
    if (event.key !== "Escape" || !isOpen) return;
    event.stopPropagation();
    setOpen(false);
    opener.current.focus();
  };
  const said = chosen.length === 0 ? "all" : chosen.length === 1 ? nameOf(chosen[0]) : `${chosen.length} chosen`;
  return html`<div class="filter" ref=${box} onKeyDown=${close}>
    <button type="button" class=${chosen.length ? "button chosen" : "button"} ref=${opener} aria-expanded=${isOpen} aria-controls=${isOpen ? id : undefined} onClick=${() => setOpen(!isOpen)}>
      <span class="quiet">${label}</span> <span class="filter-said">${said}</span><span aria-hidden="true" class="caret">▾</span>
    </button>
    ${isOpen && html`<${Choices} id=${id} label=${label} chosen=${chosen} onChange=${onChange} useOptions=${useOptions} nameOf=${nameOf} isSingle=${isSingle} />`}
  </div>`;
}

function Choices({ id, label, chosen, onChange, useOptions, nameOf, isSingle }) {
  const { options, error } = useOptions(true);
  const [text, setText] = useState("");
  const panel = useRef(null);
  useEffect(() => panel.current.querySelector("input").focus(), []);
  const known = new Set((options ?? []).map((option) => option.value));
  const kept = chosen.filter((value) => !known.has(value)).map((value) => ({ value, label: nameOf(value), requests: 0 }));
  const found = [...kept, ...(options ?? [])].filter((option) => option.label.toLowerCase().includes(text.trim().toLowerCase()));
  const shown = found.slice(0, MOST);
  const turn = (value) => {
    const rest = chosen.filter((one) => one !== value);
    onChange(rest.length < chosen.length ? rest : isSingle ? [value] : [...chosen, value]);
  };
  const move = (event) => {
    if (event.key === "Enter" && event.target.type === "search" && shown.length) {
      event.preventDefault();
      return turn(shown[0].value);
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return undefined;
    event.preventDefault();
    const stops = [...panel.current.querySelectorAll("input")];
    return stops[Math.min(stops.length - 1, Math.max(0, stops.indexOf(event.target) + step))].focus();
  };
  return html`<div class="choices" id=${id} ref=${panel} role="group" aria-label=${`Choose by ${label.toLowerCase()}`} onKeyDown=${move}>
    <input type="search" aria-label=${`Search ${label.toLowerCase()}`} placeholder="Search" value=${text} autocomplete="off" onInput=${(event) => setText(event.target.value)} />
    <${Problem} error=${error} />
    ${!options && !error && html`<p class="quiet" aria-busy="true">Loading…</p>`}
    <div class="choice-list">
      ${shown.map(
        (option) => html`<label key=${option.value} class="choice" data-value=${option.value}>
          <input type="checkbox" checked=${chosen.includes(option.value)} onChange=${() => turn(option.value)} />
          <span class="choice-name">${option.label}</span> <span class="quiet number">${count(option.requests)}</span>
        </label>`,
      )}
    </div>
    ${found.length > shown.length && html`<p class="quiet">${count(found.length - shown.length)} more; search to find them.</p>`}
    ${options && !found.length && html`<p class="quiet">${text ? "No name matches." : "No usage in this range."}</p>`}
    <p class="choice-foot"><span class="quiet">with requests in this range</span>
      ${chosen.length > 0 && html`<button type="button" class="button small" onClick=${() => onChange([])}>Clear</button>`}</p>
  </div>`;
}
