// Requests and tokens of an adapter over time, by version.
import { html, useMemo } from "../../lib.js";
import { useApi } from "../../api.js";
import { compact } from "../../format.js";
import { Link, param, setParams } from "../../place.js";
import { rangeShown, spanOf } from "../../range.js";
import { Card, Empty, Loaded, Segmented } from "../../ui.js";
import { Legend } from "../../charts/frame.js";
import { StackedBars } from "../../charts/stacked_bars.js";
import { METRICS, chartOf } from "../../usage_rows.js";

const MEASURES = { requests: METRICS.requests, total_tokens: METRICS.total_tokens };
const FEW = 8;

export function Traffic({ name, tenant, newest }) {
  const range = rangeShown();
  const usage = useApi("/v1/usage", { ...spanOf(range), tz: range.zone, tenant, adapter: name, bucket: range.bucket, group_by: "version", limit: 10_000 }, { all: true, everyS: 15, about: range });
  const metric = Object.hasOwn(MEASURES, param("measure")) ? param("measure") : "requests";
  const chart = useMemo(() => usage.data && byVersion(usage.data, usage.about, metric, newest), [usage.data, newest, metric]);
  const options = Object.entries(MEASURES).map(([value, { label }]) => ({ value, label }));
  return html`<${Card} title="Usage" note="by version" actions=${html`<${Segmented} label="Measure" value=${metric} options=${options} onChange=${(value) => setParams({ measure: value })} />`}>
    <${Loaded} of=${usage}>${() => (chart.series.length
      ? html`<${StackedBars} label=${`${MEASURES[metric].label} by version`} ...${chart} /><${Legend} series=${chart.series} format=${compact} />
        <p class="quiet"><${Link} to="/usage" params=${{ adapter: name, group: "version" }}>All its figures in the usage explorer<//></p>`
      : html`<${Empty} title="No requests in this range.">Choose a longer range, or try the adapter in the playground.<//>`)}<//>
  <//>`;
}

/** The chart in order of version; with few versions each keeps its colour, whether it was used or not. */
function byVersion(answer, range, metric, newest) {
  const { buckets, series } = chartOf(answer, range, { groups: ["version"], metric, top: answer.data.length });
  const found = new Map(series.map((one) => [one.row.version, one]));
  const isFew = series.length > 0 && newest <= FEW;
  const versions = isFew ? Array.from({ length: newest }, (_, index) => index + 1) : [...found.keys()].sort((a, b) => a - b);
  const none = { values: buckets.map(() => 0), total: 0 };
  return { buckets, series: versions.map((version) => ({ ...(found.get(version) ?? none), key: `v${version}`, label: `Version ${version}` })) };
}
