// Which time a page shows, and in buckets of which width; read from the address.
import { html } from "./lib.js";
import { param, setParams } from "./place.js";
import { DAY, HOUR, WIDTHS, bucketStart, isZone, momentOf, ownZone } from "./zone.js";
import { Select } from "./ui.js";

export const RANGES = {
  "1h": { label: "Last hour", ms: HOUR, bucket: "1m" },
  "24h": { label: "Last 24 hours", ms: DAY, bucket: "1h" },
  "7d": { label: "Last 7 days", ms: 7 * DAY, bucket: "1d" },
  "30d": { label: "Last 30 days", ms: 30 * DAY, bucket: "1d" },
  "90d": { label: "Last 90 days", ms: 90 * DAY, bucket: "1d" },
};
const BUCKETS = { "1m": "Minutes", "1h": "Hours", "1d": "Days" };
const MAX_BUCKETS = 500;

/** The zone that the address names, or the browser's. */
export const zoneShown = () => (isZone(param("tz") ?? "") ? param("tz") : ownZone());

/**
 * The time that the address asks for: a range that ends now, or two days, the last of them included.
 * @returns {{start: number, end: number, bucket: "1m"|"1h"|"1d", zone: string, name: string,
 *   previous: {start: number, end: number}}}
 */
export function rangeShown(otherwise = "24h", now = Date.now()) {
  const zone = zoneShown();
  const days = customDays(zone);
  const name = days ? "custom" : RANGES[param("range")] ? param("range") : otherwise;
  const preset = RANGES[name];
  const bucket = chosenBucket(days ? days.end - days.start : preset.ms, preset?.bucket ?? "1d");
  // A range that ends now changes once a minute, not with every look at it.
  const end = days ? days.end : Math.ceil(now / 60_000) * 60_000;
  const start = days ? days.start : bucketStart(zone, end - preset.ms + WIDTHS[bucket] - 1, bucket);
  return { start, end, bucket, zone, name, previous: { start: start - (end - start), end: start } };
}

/** What the API takes for a range. */
export const spanOf = ({ start, end }) => ({ start: new Date(start).toISOString(), end: new Date(end).toISOString() });

function customDays(zone) {
  const [first, last] = [param("start"), param("end")].map((text) => Date.parse(`${text ?? ""}T00:00:00Z`));
  if (!(first <= last)) return null;
  return { start: momentOf(zone, first), end: momentOf(zone, last + DAY) };
}

function chosenBucket(ms, otherwise) {
  const wanted = param("bucket");
  const width = WIDTHS[wanted];
  return width && ms / width <= MAX_BUCKETS && ms / width >= 1 ? wanted : otherwise;
}

/** Range, zone and, where `withBucket`, width of the buckets. */
export function RangePicker({ otherwise = "24h", withBucket = false }) {
  const range = rangeShown(otherwise);
  const day = (at) => new Date(at + 12 * HOUR).toISOString().slice(0, 10);
  const presets = Object.entries(RANGES).map(([value, { label }]) => ({ value, label }));
  const choose = (value) =>
    value === "custom"
      ? setParams({ range: null, bucket: null, start: day(range.start), end: day(range.end - DAY / 2) })
      : setParams({ range: value, bucket: null, start: null, end: null });
  const ms = range.end - range.start;
  const widths = Object.entries(BUCKETS).filter(([name]) => ms / WIDTHS[name] <= MAX_BUCKETS && ms >= WIDTHS[name]);
  const zones = [...new Set([range.zone, ownZone(), "UTC", ...(Intl.supportedValuesOf?.("timeZone") ?? [])])];
  return html`<div class="picker">
    <${Select} label="Range" value=${range.name} onChange=${choose}
      options=${[...presets, { value: "custom", label: "From day to day" }]} />
    ${range.name === "custom" &&
    html`<input type="date" aria-label="First day" value=${param("start")} max=${param("end")}
        onChange=${(event) => event.target.value && setParams({ start: event.target.value })} />
      <input type="date" aria-label="Last day" value=${param("end")} min=${param("start")}
        onChange=${(event) => event.target.value && setParams({ end: event.target.value })} />`}
    ${withBucket &&
    html`<${Select} label="By" value=${range.bucket} onChange=${(bucket) => setParams({ bucket })}
      options=${widths.map(([value, label]) => ({ value, label }))} />`}
    <${Select} label="Time zone" value=${range.zone} onChange=${(tz) => setParams({ tz })}
      options=${zones.map((value) => ({ value, label: value.replaceAll("_", " ") }))} />
  </div>`;
}
