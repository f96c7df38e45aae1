// Hours and days of a time zone. Times are milliseconds since 1970.
export const HOUR = 3_600_000;
export const DAY = 24 * HOUR;
export const WIDTHS = { "1m": 60_000, "1h": HOUR, "1d": DAY };

/** The zone of this browser. */
export const ownZone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

/** Whether the browser knows a zone of this name. */
export function isZone(name) {
  try {
    new Intl.DateTimeFormat("en", { timeZone: name });
    return true;
  } catch {
    return false;
  }
}

const clocks = new Map();
const clockOf = (zone) => {
  if (!clocks.has(zone)) {
    const fields = { year: "numeric", month: "numeric", day: "numeric", hour: "numeric", minute: "numeric", second: "numeric" };
    clocks.set(zone, new Intl.DateTimeFormat("en-US", { timeZone: zone, hourCycle: "h23", ...fields }));
  }
  return clocks.get(zone);
};

/** What the zone's clocks are ahead of UTC at a moment, in milliseconds. */
export function offsetAt(zone, at) {
  const parts = Object.fromEntries(clockOf(zone).formatToParts(at).map(({ type, value }) => [type, Number(value)]));
  const shown = Date.UTC(parts.year, parts.month - 1, parts.day, parts.hour, parts.minute, parts.second);
  return shown - Math.floor(at / 1000) * 1000;
}

/** The moment at which the zone's clocks show this; the later one where they show it twice. */
export function momentOf(zone, shown) {
  const guess = shown - offsetAt(zone, shown);
  return shown - offsetAt(zone, guess);
}

/** The first moment of the bucket that holds a moment. */
export function bucketStart(zone, at, bucket) {
  const width = WIDTHS[bucket];
  const shown = at + offsetAt(zone, at);
  return momentOf(zone, Math.floor(shown / width) * width);
}

/** The first moments of all buckets from `start` to `end`. */
export function bucketsBetween(zone, start, end, bucket) {
  const width = WIDTHS[bucket];
  const found = [];
  for (let at = bucketStart(zone, start, bucket); at < end; ) {
    found.push(at);
    // A little past the next one, since a day may have 25 hours; at least one width on where clocks are put back.
    const next = bucket === "1d" ? bucketStart(zone, at + width + 2 * HOUR, bucket) : at + width;
    at = next > at ? next : at + width;
  }
  return found;
}

/** A bucket's name on an axis. */
export function bucketLabel(zone, at, bucket) {
  const form = bucket === "1d" ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...form }).format(at);
}

/** A bucket's full name. */
export function bucketTitle(zone, at, bucket) {
  const day = { weekday: "short", day: "numeric", month: "short", year: "numeric" };
  const form = bucket === "1d" ? day : { ...day, hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...form }).format(at);
}
