// Numbers, times and sizes as people read them.
const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 1234567 -> 1,234,567 */
export const count = (value) => whole.format(value);

/** 1234567 -> 1.2M; small numbers whole */
export const compact = (value) => (Math.abs(value) < 10_000 ? whole.format(Math.round(value)) : short.format(value));

/** 5000 -> 5K: the numbers of an axis, which are round */
export const round = (value) => short.format(value);

/** 0.1234 -> 12.3% */
export const percent = (share) =>
  share === null || share === undefined ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.00995 ? 2 : 1)}%`;

/** Seconds: 0.0123 -> 12.3 ms, 2.5 -> 2.50 s, 75 -> 1 min 15 s */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  const rounded = Math.round(value);
  const minutes = Math.floor(rounded / 60);
  return minutes < 60 ? `${minutes} min ${rounded % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** 1536 -> 1.5 KiB */
export function bytes(value) {
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  const size = value / 1024 ** unit;
  return `${unit ? size.toFixed(size < 10 ? 1 : 0) : size} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** An exact decimal text with a currency: ("12.3400", "USD") -> 12.34 USD; digits below a cent only where they matter */
export function money(text, currency) {
  if (text === undefined || text === null) return "–";
  const value = Number(text);
  const digits = value !== 0 && Math.abs(value) < 1 ? 4 : 2;
  return `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${currency ?? ""}`.trim();
}

/** An exact decimal text to its last digit, at least `digits` of them: ("1234.5", 4) -> 1,234.5000 */
export function exactMoney(text, digits = 2) {
  const [large, small = ""] = text.split(".");
  return `${whole.format(BigInt(large))}.${small.padEnd(digits, "0")}`;
}

/** How many digits an exact decimal text has behind its point. */
export const digitsOf = (text) => (text.split(".")[1] ?? "").length;

/** How much more than before: (120, 100) -> +20.0%; null where there is nothing to compare with, NaN until both are known. */
export function change(now, before) {
  if (now === undefined || before === undefined) return NaN;
  if (now === null || before === null || before === 0) return null;
  return (now - before) / before;
}

/** sha256:0123456789abcdef… -> sha256:0123456789ab */
export const shortDigest = (digest) => (digest ? digest.slice(0, "sha256:".length + 12) : "–");

/** An ISO time, or milliseconds since 1970, in a zone: 2026-11-22 14:05 */
export function time(iso, zone, { withSeconds = false } = {}) {
  if (!iso) return "–";
  const form = { timeZone: zone, dateStyle: "short", timeStyle: withSeconds ? "medium" : "short" };
  return new Intl.DateTimeFormat("sv-SE", form).format(new Date(iso));
}

/** An ISO time as an age: 5 min ago */
export function ago(iso, now = Date.now()) {
  if (!iso) return "never";
  const passed = Math.max(0, (now - new Date(iso).getTime()) / 1000);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}
