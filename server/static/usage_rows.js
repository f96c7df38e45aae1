// What rows of GET /v1/usage are called, and what a chart makes of them.
import { bucketAt, bucketsBetween } from "./zone.js";
import { count, money } from "./format.js";

/** What rows can be grouped and filtered by. */
export const DIMENSIONS = { tenant: "Tenant", adapter: "Adapter", version: "Version", key: "Key", status: "Status" };

/** What can be charted: its name, what the server ranks groups by, and its value in a row. */
export const METRICS = {
  total_tokens: { label: "Total tokens", rankBy: "total_tokens", of: (row) => row.prompt_tokens + row.completion_tokens },
  prompt_tokens: { label: "Prompt tokens", rankBy: "prompt_tokens", of: (row) => row.prompt_tokens },
  cached_tokens: { label: "Cached tokens", rankBy: "prompt_tokens", of: (row) => row.cached_tokens },
  completion_tokens: { label: "Completion tokens", rankBy: "completion_tokens", of: (row) => row.completion_tokens },
  requests: { label: "Requests", rankBy: "requests", of: (row) => row.requests },
  cost: { label: "Cost", rankBy: "cost", of: (row) => Number(row.cost ?? 0) },
};

/** How many of these were answered with an error; clients that went away (`aborted`) are none. */
export const ERRORS = ["error", "interrupted"];

/** What a row's value of a dimension is called. `keys` are keys by id. */
export function nameOf(row, dimension, keys = {}) {
  if (row.other) return "Other";
  const value = row[dimension];
  if (dimension === "adapter") return value ?? "base model";
  if (dimension === "version") return row.adapter === null ? "base model" : `${row.adapter}@${value ?? "?"}`;
  if (dimension === "key") return value === null ? "no key" : keyName(value, keys);
  return value ?? (dimension === "tenant" ? "the admin's own" : "unknown");
}

/** A key's own name and how it begins, or its id where those are not known. */
export function keyName(id, keys) {
  const key = keys[id];
  if (!key) return id;
  return key.name ? `${key.name} (${key.prefix}…)` : `${key.prefix}…`;
}

/** What a row's group is called: "haiku · stop"; `groups` in the order of the names, `others` what Other stands for. */
function groupName(row, groups, { keys, others } = {}) {
  if (row.other) return others ? `Other (${count(others)} more)` : "Other";
  return groups.map((group) => nameOf(row, group, keys)).join(" · ") || "All";
}

const keyOf = (row, groups) => (row.other ? "other" : JSON.stringify(groups.flatMap((group) => (group === "version" ? [row.adapter, row.version] : [row[group]]))));

/**
 * A chart's buckets, those without usage too, and its series, largest first and Other last; an answer may have more
 * groups than the chart has room for.
 * @param {{data: object[], groups?: number}} answer What the API said to a question with buckets and groups.
 * @param {{start: number, end: number, bucket: string, zone: string}} range
 * @param {{groups: string[], metric: string, top: number, keys?: Record<string, object>}} question
 */
export function chartOf(answer, range, { groups, metric, top, keys }) {
  const starts = bucketsBetween(range.zone, range.start, range.end, range.bucket);
  const place = new Map(starts.map((at, index) => [at, index]));
  const { of } = METRICS[metric];
  const others = (answer.groups ?? 0) - top;
  const series = new Map();
  for (const row of answer.data) {
    const at = place.get(Date.parse(row.start));
    if (at === undefined) throw new Error(`there is no ${range.bucket} of ${range.zone} that starts at ${row.start}`);
    const key = keyOf(row, groups);
    if (!series.has(key)) {
      const label = groupName(row, groups, { keys, others });
      series.set(key, { key, label, row, isOther: row.other === true, total: 0, values: new Array(starts.length).fill(0) });
    }
    const one = series.get(key);
    one.values[at] += of(row);
    one.total += of(row);
  }
  const ordered = [...series.values()].sort((a, b) => a.isOther - b.isOther || b.total - a.total);
  const [shown, rest] = [ordered.slice(0, top), ordered.slice(top)];
  if (rest.length) shown.push(rest.length === 1 ? rest[0] : together(rest, groupName({ other: true }, groups, { others })));
  return { buckets: starts.map((at) => bucketAt(range.zone, at, range.bucket)), series: shown };
}

/** Several series as one. */
function together(series, label) {
  const values = series[0].values.map((_, at) => series.reduce((sum, one) => sum + one.values[at], 0));
  return { key: "other", label, isOther: true, total: series.reduce((sum, one) => sum + one.total, 0), values };
}

/** How a metric is written: as money, or as `plain` writes numbers. */
export const formatOf = (metric, currency, plain) => (metric === "cost" ? (value) => money(value, currency) : plain);
