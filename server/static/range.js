// The range of time that a page shows, and the width of its buckets; both are in the address.
import { html } from "./lib.js";
import { time } from "./format.js";
import { param, setParams } from "./place.js";
import { DAY, HOUR, WIDTHS, bucketAfter, bucketStart, dayOf, isZone, momentOf, ownZone } from "./zone.js";
import { Select } from "./ui.js";

const RANGES = {
  "1h": { label: "Last hour", ms: HOUR },
  "24h": { label: "Last 24 hours", ms: DAY },
  "7d": { label: "Last 7 days", ms: 7 * DAY },
  "30d": { label: "Last 30 days", ms: 30 * DAY },
  "90d": { label: "Last 90 days", ms: 90 * DAY },
  month: { label: "This month", months: 0 },
  "last-month": { label: "Last month", months: -1 },
};
const BUCKETS = { "1m": "Minutes", "1h": "Hours", "1d": "Days" };
const MAX_BUCKETS = 500;
const MAX_DAYS = 3 * 366; // while a year is typed, it is 0002 and 0020 first
const DATE = /^\d{4}-\d{2}-\d{2}$/;

/** The zone that the address names, or the browser's. */
const zoneShown = () => (isZone(param("tz") ?? "") ? param("tz") : ownZone());

/** An ISO time in that zone. */
export const timeShown = (iso, options) => time(iso, zoneShown(), options);

/**
 * The time that the address asks for: a range that ends now, a month, or two days, the last of them included.
 * @returns {{start: number, end: number, bucket: "1m"|"1h"|"1d", zone: string, name: string, widths: string[],
 *   isNow: boolean, isCut: boolean, previous: {start: number, end: number}}} `widths` are those that `bucket` can be;
 *   `isNow` tells whether more will come, `isCut` that the first days asked for are too long ago to be shown with the last.
 */
export function rangeShown(otherwise = "24h", now = Date.now()) {
  const zone = zoneShown();
  // A range that ends now changes once a minute, not with every look at it.
  const minute = Math.ceil(now / WIDTHS["1m"]) * WIDTHS["1m"];
  const days = customDays(zone);
  const name = days ? "custom" : Object.hasOwn(RANGES, param("range")) ? param("range") : otherwise;
  const { ms, months } = RANGES[name] ?? {};
  const whole = days ?? (ms ? { start: minute - ms, end: minute } : monthOf(zone, minute, months));
  const widths = widthsFor(whole.end - whole.start);
  const bucket = widths.includes(param("bucket")) ? param("bucket") : widthFor(whole.end - whole.start);
  const first = bucketStart(zone, whole.start, bucket);
  // The last 24 hours begin with a whole hour, else the first bar would show a part of one.
  const start = !ms || first === whole.start ? whole.start : bucketAfter(zone, first, bucket);
  const end = whole.end;
  return { start, end, bucket, zone, name, widths, isNow: end >= minute, isCut: whole.isCut ?? false, previous: { start: start - (end - start), end: start } };
}

/** What the API takes for a range. */
export const spanOf = ({ start, end }) => ({ start: new Date(start).toISOString(), end: new Date(end).toISOString() });

function customDays(zone) {
  const [first, last] = [param("start"), param("end")].map((text) => (DATE.test(text ?? "") ? Date.parse(`${text}T00:00:00Z`) : NaN));
  if (!(first <= last && last > 0)) return null;
  const shown = Math.max(first, last - (MAX_DAYS - 1) * DAY, 0);
  return { start: momentOf(zone, shown), end: momentOf(zone, last + DAY), isCut: shown > first };
}

function monthOf(zone, now, months) {
  const [year, month] = dayOf(zone, now - 1).split("-").map(Number);
  const [start, next] = [months, months + 1].map((more) => momentOf(zone, Date.UTC(year, month - 1 + more)));
  return { start, end: Math.min(next, now) };
}

const widthFor = (ms) => (ms <= 3 * HOUR ? "1m" : ms <= 3 * DAY ? "1h" : "1d");

/** Neither more bars than a chart can show nor a single one, but for a day or hour that is all there is. */
function widthsFor(ms) {
  return Object.keys(BUCKETS).filter((name) => name === widthFor(ms) || (ms / WIDTHS[name] <= MAX_BUCKETS && ms > WIDTHS[name]));
}

/** Range, zone and, where `withBucket`, width of the buckets. */
export function RangePicker({ otherwise = "24h", withBucket = false }) {
  const range = rangeShown(otherwise);
  const choose = (value) =>
    value === "custom"
      ? setParams({ range: null, bucket: null, start: dayOf(range.zone, range.start), end: dayOf(range.zone, range.end - 1) })
      : setParams({ range: value, bucket: null, start: null, end: null });
  const zones = [...new Set([range.zone, ownZone(), "UTC", ...(Intl.supportedValuesOf?.("timeZone") ?? [])])];
  return html`<div class="picker">
    <${Select} label="Range" value=${range.name} onChange=${choose} options=${[...Object.entries(RANGES).map(([name, { label }]) => [name, label]), ["custom", "Custom days"]]} />
    ${range.name === "custom" && html`<input type="date" aria-label="First day" value=${param("start")} max=${param("end")}
        onChange=${(event) => event.target.value && setParams({ start: event.target.value })} />
      <input type="date" aria-label="Last day" value=${param("end")} min=${param("start")}
        onChange=${(event) => event.target.value && setParams({ end: event.target.value })} />
      ${range.isCut && html`<span class="quiet" role="status">Shown from ${dayOf(range.zone, range.start)} on, because at most three years can be shown.</span>`}`}
    ${withBucket && html`<${Select} label="By" value=${range.bucket} onChange=${(bucket) => setParams({ bucket })}
      options=${range.widths.map((width) => [width, BUCKETS[width]])} />`}
    <${Select} label="Time zone" value=${range.zone} onChange=${(tz) => setParams({ tz })}
      options=${zones.map((zone) => [zone, zone.replaceAll("_", " ")])} />
  </div>`;
}
