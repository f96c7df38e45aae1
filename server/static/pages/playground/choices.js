// The playground's prompt, models and parameters, all kept in the address.
import { useApi } from "../../api.js";
import { param, paramAll, setParams } from "../../place.js";
import { isAdmin } from "../../session.js";

export const MOST_MODELS = 4;
const LONGEST_IN_ADDRESS = 1500;
const DEFAULTS = { mode: "chat", max_tokens: "128", temperature: "0", seed: "", system: "", prompt: "" };

/** A parameter as it is in the address, or what it is otherwise. */
export const chosen = (name) => param(name, DEFAULTS[name]);

/** Remember a choice; what is as usual, or too long, is left out of the address. */
export const choose = (name, value) => setParams({ [name]: value === DEFAULTS[name] || value.length > LONGEST_IN_ADDRESS ? null : value }, { replace: true });

export const chooseModels = (models, options) => setParams({ model: models }, options);

/**
 * The models that the session may use, by the names that the API takes.
 * @returns {{names: string[], base: string|null, error: object|null, isLoading: boolean, reload: () => void}}
 */
export function useModels() {
  const tenant = isAdmin() ? param("tenant") : null;
  // An admin who acts for no tenant writes the owner in front of each adapter.
  const isEverybody = isAdmin() && !tenant;
  const models = useApi("/v1/models", { tenant });
  const adapters = useApi(isEverybody ? "/v1/adapters" : null, { tenant: "*", limit: 1000 }, { all: true });
  const listed = models.data?.data ?? [];
  const base = listed.find((one) => one.parent === null)?.id ?? null;
  const own = listed.filter((one) => one.parent !== null).map((one) => one.id);
  const everybodys = isEverybody ? (adapters.data?.data ?? []).map((one) => `${one.tenant}/${one.name}`) : [];
  return {
    names: [...new Set([...(base ? [base] : []), ...own, ...everybodys])],
    base,
    error: models.error ?? adapters.error,
    isLoading: models.data === undefined || (isEverybody && adapters.data === undefined && !adapters.error),
    reload: () => {
      models.reload();
      adapters.reload();
    },
  };
}

/** Who is asked: as the address says, or the base and the first two adapters. */
export function modelsShown(names) {
  const wanted = paramAll("model").slice(0, MOST_MODELS);
  return wanted.length ? wanted : names.slice(0, 3);
}
