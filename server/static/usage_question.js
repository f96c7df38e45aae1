// The query in the explorer's address, and what its filters offer.
import { useEffect, useState } from "./lib.js";
import { call, useApi } from "./api.js";
import { param, paramAll } from "./place.js";
import { spanOf } from "./range.js";
import { isAdmin, me } from "./session.js";
import { say } from "./ui.js";
import { BASE, DIMENSIONS, METRICS, keyName, nameOf, toApi } from "./usage_rows.js";

const TOPS = [5, 8, 12];
const MAX_TENANTS = 20;

/** What is chosen of each dimension, as the API takes it. */
export function filtersShown() {
  const chosen = { tenant: isAdmin() ? param("tenant") : null };
  for (const name of ["adapter", "version", "key", "status"]) chosen[name] = paramAll(name).map(toApi);
  return chosen;
}

/** The whole question, but for its range. */
export function questionShown() {
  const canGroup = (name) => Object.hasOwn(DIMENSIONS, name) && (name !== "tenant" || isAdmin());
  const wanted = param("group", isAdmin() && !param("tenant") ? "tenant" : "adapter");
  const group = canGroup(wanted) ? wanted : null;
  const subgroup = group && canGroup(param("subgroup")) && param("subgroup") !== group ? param("subgroup") : null;
  // Adapters of several tenants may have one name.
  const isShared = isAdmin() && !param("tenant") && [group, subgroup].some((name) => name === "adapter" || name === "version");
  return {
    metric: Object.hasOwn(METRICS, param("metric")) ? param("metric") : "total_tokens",
    group,
    subgroup,
    groups: [...new Set([isShared ? "tenant" : null, group, subgroup])].filter(Boolean),
    top: TOPS.includes(Number(param("top"))) ? Number(param("top")) : 8,
    filters: filtersShown(),
    isPerBucket: param("rows") === "bucket",
  };
}

/** Options of a filter: values with usage in the range and under the other filters, most used first. */
export function useOptionsOf(dimension, range) {
  const keys = useKeys(range, filtersShown(), dimension === "key");
  const { [dimension]: _, ...others } = filtersShown();
  const answer = useApi("/v1/usage", { ...spanOf(range), ...others, group_by: dimension, limit: 10_000 });
  if (answer.data === undefined) return { options: undefined, error: answer.error };
  const found = new Map();
  for (const row of answer.data.data) {
    const value = valueOf(row, dimension);
    if (value === null) continue;
    const label = dimension === "version" ? value : dimension === "key" ? keyName(value, keys) : nameOf(row, dimension);
    const option = found.get(value) ?? { value, label, requests: 0 };
    option.requests += row.requests;
    found.set(value, option);
  }
  return { options: [...found.values()].sort((a, b) => b.requests - a.requests), error: answer.error };
}

/** How a row's value stands in the address; null where it cannot be asked for. */
function valueOf(row, dimension) {
  if (dimension === "adapter") return row.adapter ?? BASE;
  return row[dimension] === null ? null : String(row[dimension]);
}

/** The keys that may be shown, by id: for an admin those of the tenants shown, for a tenant its own. */
export function useKeys(range, filters, isWanted) {
  const [keys, setKeys] = useState({});
  const own = me.value.key;
  const isAsked = isWanted && isAdmin();
  const found = useApi(isAsked && !filters.tenant ? "/v1/usage" : null, { ...spanOf(range), group_by: "tenant", top: MAX_TENANTS, rank_by: "requests" });
  const rows = found.data?.data ?? [];
  const tenants = isAsked ? (filters.tenant ? [filters.tenant] : rows.map((row) => row.tenant).filter(Boolean)) : [];
  useEffect(() => {
    for (const tenant of tenants) {
      call("GET", `/v1/tenants/${encodeURIComponent(tenant)}/keys`).then(
        ({ data }) => setKeys((before) => ({ ...before, ...Object.fromEntries(data.map((key) => [key.id, key])) })),
        (error) => {
          if (error.status === undefined) throw error;
          if (error.status !== 404) say(`The names of ${tenant}'s keys are missing: ${error.message}`); // 404: the tenant is gone
        },
      );
    }
  }, [tenants.join()]);
  return own ? { ...keys, [own.id]: own } : keys;
}
