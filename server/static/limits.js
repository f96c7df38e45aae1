// The limits of a tenant or a key: how much is used, and how they are set.
import { html, useState } from "./lib.js";
import { bytes, compact, count } from "./format.js";
import { Empty, Field } from "./ui.js";

/** Each limit with its label; `key` says that a single key can have it too. */
const LIMITS = {
  requests_per_minute: { label: "Requests per minute", key: true },
  tokens_per_minute: { label: "Tokens per minute", hint: "prompt and generated", key: true },
  concurrent_requests: { label: "Requests at a time", key: true },
  tokens_per_month: { label: "Tokens per month", hint: "of a calendar month in UTC", key: true },
  adapters: { label: "Adapters" },
  stored_bytes: { label: "Stored bytes", hint: "of all adapter versions; 1 GiB is 1073741824", format: bytes },
  adapter_pages: { label: "Device pages of one adapter version" },
  pinned_pages: { label: "Pinned device pages", hint: "of all pinned adapters together" },
};

const format = (name, value) => (LIMITS[name]?.format ?? (value >= 1e6 ? compact : count))(value);

/** The limits that are set, in a few words. */
export function Limits({ limits }) {
  const set = Object.entries(limits).map(([name, value]) => `${LIMITS[name]?.label ?? name}: ${format(name, value)}`);
  return html`<span class=${set.length ? "wrap" : "wrap short"}>${set.join(" · ") || "none"}</span>`;
}

/** What is used, against the limits that are set. */
export function LimitBars({ limits, used }) {
  const names = Object.keys(LIMITS).filter((name) => name in limits || used[name]);
  if (!names.length) return html`<${Empty} title="No limit is set, and nothing was used yet." />`;
  return html`<ul class="limit-bars">
    ${names.map((name) => {
      const most = limits[name];
      const share = most === undefined ? null : most === 0 ? 1 : Math.min(1, (used[name] ?? 0) / most);
      const tone = share === null ? "" : share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "";
      return html`<li key=${name} data-limit=${name}>
        <div class="limit-line"><span>${LIMITS[name].label}</span>
          <span>${used[name] === undefined ? "" : html`<strong>${format(name, used[name])}</strong> `}
            <span class="quiet">${most === undefined ? "no limit" : used[name] === undefined ? `at most ${format(name, most)}` : `of ${format(name, most)}`}</span></span></div>
        ${share !== null && used[name] !== undefined && html`<meter class=${tone} min="0" max="1" value=${share} aria-label=${`${LIMITS[name].label}: ${Math.round(share * 100)}% used`} />`}
      </li>`;
    })}
  </ul>`;
}

/** Inputs for limits; an empty one does not limit. `values` maps names to texts. */
export function LimitFields({ values, onChange, ofKey = false }) {
  const names = Object.keys(LIMITS).filter((name) => !ofKey || LIMITS[name].key);
  return html`<div class="limit-fields">
    ${names.map(
      (name) => html`<${Field} key=${name} label=${LIMITS[name].label} hint=${LIMITS[name].hint} inputmode="numeric" placeholder="no limit" name=${name}
        value=${values[name] ?? ""} onInput=${(event) => onChange({ ...values, [name]: event.target.value })}
        error=${isLimit(values[name]) ? null : "A whole number of at least 0, or nothing."} />`,
    )}
  </div>`;
}

const isLimit = (text) => !text || /^\d{1,15}$/.test(text.trim());

/** State of `LimitFields`: the texts, the limits they mean, and whether all can be sent. */
export function useLimits(limits) {
  const [values, setValues] = useState(() => Object.fromEntries(Object.entries(limits).map(([name, value]) => [name, String(value)])));
  const set = Object.entries(values).filter(([, text]) => text?.trim());
  return {
    values,
    setValues,
    isValid: Object.values(values).every(isLimit),
    limits: Object.fromEntries(set.map(([name, text]) => [name, Number(text)])),
  };
}
