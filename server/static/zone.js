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
function offsetAt(zone, at) {
  const parts = Object.fromEntries(clockOf(zone).formatToParts(at).map(({ type, value }) => [type, Number(value)]));
  const shown = Date.UTC(parts.year, parts.month - 1, parts.day, parts.hour, parts.minute, parts.second);
  return shown - Math.floor(at / 1000) * 1000;
}

/** The first moment at which the zone's clocks show this; where they leap over it, the moment of the leap. */
export function momentOf(zone, shown) {
  const [before, after] = [shown - DAY, shown + DAY].map((at) => shown - offsetAt(zone, at));
  const found = [before, after].filter((at) => at + offsetAt(zone, at) === shown);
  return found.length ? Math.min(...found) : before;
}

/** What the zone's calendar says at a moment: 2026-11-22 */
export const dayOf = (zone, at) => new Date(at + offsetAt(zone, at)).toISOString().slice(0, 10);

/** When the hour of the zone's clocks began that holds a moment, if they did not leap since. */
const hourOf = (zone, at) => at - modulo(at + offsetAt(zone, at), HOUR);

/** The first moment of the bucket that holds a moment. */
export function bucketStart(zone, at, bucket) {
  const minute = WIDTHS["1m"];
  if (bucket === "1m") return Math.floor(at / minute) * minute;
  if (bucket === "1d") return momentOf(zone, Date.parse(dayOf(zone, at)));
  const hour = hourOf(zone, at);
  let start = hour;
  while (hourOf(zone, start) !== hour) start += minute; // up to a leap by a part of an hour
  return start;
}

/** The first moments of all buckets from `start` to `end`, as the server has them. */
export function bucketsBetween(zone, start, end, bucket) {
  const found = [];
  for (let at = bucketStart(zone, start, bucket); at < end; at = bucketAfter(zone, at, bucket)) found.push(at);
  return found;
}

/** The first moment of the bucket behind the one that starts at `at`. */
export function bucketAfter(zone, at, bucket) {
  if (bucket === "1m") return at + WIDTHS["1m"];
  if (bucket === "1d") return bucketStart(zone, at + 30 * HOUR, bucket); // a day has 22 to 26 hours
  // Where clocks leap by a part of an hour, the hours around the leap are cut short.
  let next = bucketStart(zone, at + HOUR, bucket);
  for (let between; (between = bucketStart(zone, next - 1, bucket)) > at; ) next = between;
  return next;
}

const modulo = (value, by) => value - Math.floor(value / by) * by;

/** A bucket on an axis: its first moment, its short label and its full title. */
export function bucketAt(zone, at, bucket) {
  const clock = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const day = { weekday: "short", day: "numeric", month: "short", year: "numeric" };
  const isDay = bucket === "1d";
  const said = (form) => new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...form }).format(at);
  return { at, label: said(isDay ? { day: "numeric", month: "short" } : clock), title: said(isDay ? day : { ...day, ...clock }) };
}
