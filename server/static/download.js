// Downloads of the API's answers as CSV and JSON.
import { callAll, send } from "./api.js";
import { dayOf } from "./zone.js";

const PAGE = 10_000;

/** Hand a file to the browser's downloads. */
export function saveFile(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** All pages of a question as one CSV: the API's own lines, the header once. */
export async function csvOf(path, params) {
  const parts = [];
  for (let after; ; ) {
    const response = await send("GET", path, { params: { ...params, after, limit: PAGE, format: "csv" } });
    const text = await response.text();
    parts.push(parts.length ? text.slice(text.indexOf("\r\n") + 2) : text);
    after = response.headers.get("x-weft-next");
    if (!after) return parts;
  }
}

/** All pages of a question as one JSON answer. */
export const jsonOf = async (path, params) => [`${JSON.stringify(await callAll(path, { ...params, limit: PAGE }), null, 2)}\n`];

/** weft-usage_2026-11-01_2026-11-30.csv: the first and the last day, with the hour where a range begins or ends within a day. */
export function fileName(kind, { start, end, zone }, extension) {
  const stamp = (at, day) => (isMidnight(zone, at) ? day : new Intl.DateTimeFormat("sv-SE", { timeZone: zone, dateStyle: "short", timeStyle: "short" }).format(at).replace(" ", "T").replace(":", ""));
  return `weft-${kind}_${stamp(start, dayOf(zone, start))}_${stamp(end, dayOf(zone, end - 1))}.${extension}`;
}

const isMidnight = (zone, at) => dayOf(zone, at) !== dayOf(zone, at - 1);
