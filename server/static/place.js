// The page's address: path and parameters. Every choice on a page is in its address, so the address can be shared.
import { html, signal } from "./lib.js";
import { address } from "./api.js";

const read = () => ({ path: location.pathname, params: new URLSearchParams(location.search) });

/** @type {import("./vendor/signals.js").Signal<{path: string, params: URLSearchParams}>} */
export const place = signal(read());
addEventListener("popstate", () => (place.value = read()));

/** What goes along from page to page. */
const KEPT = ["tenant", "range", "start", "end", "tz"];

/** One value of the address. */
export const param = (name, otherwise = null) => place.value.params.get(name) ?? otherwise;

/** All values of a name. */
export const paramAll = (name) => place.value.params.getAll(name);

/** The address of a page: range, zone and tenant go along, and `changes` on top of them. */
function addressOf(path, changes = {}) {
  const kept = new URLSearchParams();
  for (const name of KEPT) if (place.value.params.has(name)) kept.set(name, place.value.params.get(name));
  return withParams(path, kept, changes);
}

/** Change what the address says of this page; null, an empty list or an empty text takes a name away. */
export const setParams = (changes, options) => open(withParams(place.value.path, place.value.params, changes), options);

/** Show another page. */
export const go = (path, changes) => open(addressOf(path, changes));

/** Show an address of this site. */
export function open(url, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", url);
  const moved = location.pathname !== place.value.path;
  place.value = read();
  if (moved) {
    scrollTo(0, 0);
    document.querySelector("main")?.focus({ preventScroll: true });
  }
}

/** A link within the dashboard; it does not reload the page. */
export function Link({ to, params, children, ...rest }) {
  const href = addressOf(to, params);
  const follow = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    open(href);
  };
  return html`<a href=${href} onClick=${follow} ...${rest}>${children}</a>`;
}

function withParams(path, before, changes) {
  const names = new Set([...before.keys(), ...Object.keys(changes)]);
  return address(path, Object.fromEntries([...names].map((name) => [name, Object.hasOwn(changes, name) ? changes[name] || null : before.getAll(name)])));
}
