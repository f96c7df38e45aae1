// What was asked of an adapter over time, by version.
import { html, useMemo } from "../../lib.js";
import { useApi } from "../../api.js";
import { compact } from "../../format.js";
import { Link, param, setParams } from "../../place.js";
import { rangeShown, spanOf } from "../../range.js";
import { Card, Empty, Loaded, Segmented } from "../../ui.js";
import { Legend, StackedBars } from "../../charts/stacked_bars.js";
import { bucketLabel, bucketStart, bucketTitle, bucketsBetween } from "../../zone.js";

const MEASURES = { requests: (row) => row.requests, tokens: (row) => row.prompt_tokens + row.completion_tokens };

const FEW = 8;

export function Traffic({ name, tenant, newest }) {
  const range = rangeShown();
  const zone = range.zone === "UTC" ? undefined : range.zone;
  const usage = useApi("/v1/usage", { ...spanOf(range), tz: zone, tenant, adapter: name, bucket: range.bucket, group_by: "version", limit: 10_000 }, { all: true, everyS: 15 });
  const measure = Object.hasOwn(MEASURES, param("measure")) ? param("measure") : "requests";
  const chart = useMemo(() => chartOf(usage.data?.data ?? [], range, MEASURES[measure], newest), [usage.data, newest, range.start, range.end, range.bucket, range.zone, measure]);
  const options = [{ value: "requests", label: "Requests" }, { value: "tokens", label: "Tokens" }];
  return html`<${Card} title="Usage" note="by version" actions=${html`<${Segmented} label="Measure" value=${measure} options=${options} onChange=${(value) => setParams({ measure: value })} />`}>
    <${Loaded} of=${usage}>${() => (chart.series.length
      ? html`<${StackedBars} label=${`${measure === "tokens" ? "Tokens" : "Requests"} by version`} ...${chart} /><${Legend} series=${chart.series} format=${compact} />
        <p class="quiet"><${Link} to="/usage" params=${{ adapter: name, group_by: "version" }}>All figures of it in the usage explorer<//></p>`
      : html`<${Empty} title="Nothing was asked of it in this time.">Choose a longer range, or try it in the playground.<//>`)}<//>
  <//>`;
}

/** Bars for each bucket and version; a few versions all have their colour, asked or not. */
function chartOf(rows, range, measure, newest) {
  const starts = bucketsBetween(range.zone, range.start, range.end, range.bucket);
  const placeOf = new Map(starts.map((at, index) => [at, index]));
  const zeros = () => starts.map(() => 0);
  const all = rows.length && newest <= FEW ? Array.from({ length: newest }, (_, index) => index + 1) : [];
  const byVersion = new Map(all.map((version) => [version, zeros()]));
  for (const row of rows) {
    const place = placeOf.get(bucketStart(range.zone, Date.parse(row.start), range.bucket));
    if (place === undefined) continue;
    if (!byVersion.has(row.version)) byVersion.set(row.version, zeros());
    byVersion.get(row.version)[place] += measure(row);
  }
  const series = [...byVersion].sort(([a], [b]) => a - b).map(([version, values]) => ({
    key: `v${version}`, label: `Version ${version}`, values, total: values.reduce((a, b) => a + b, 0) }));
  const buckets = starts.map((at) => ({ at, label: bucketLabel(range.zone, at, range.bucket), title: bucketTitle(range.zone, at, range.bucket) }));
  return { series, buckets };
}
