// Who is signed in, and the page on which one does.
import { html, signal, useState } from "./lib.js";
import { call, me, useApi, useSending } from "./api.js";
import { param, setParams } from "./place.js";
import { Button, Field, Problem, Select, say } from "./ui.js";

/** Why the session could not be looked up. */
export const meProblem = signal(null);

export const isAdmin = () => me.value?.role === "admin";
/** Whether the session has this scope: "infer", "adapters" or "usage". */
export const may = (scope) => isAdmin() || (me.value?.key?.scopes.includes(scope) ?? false);

/** The tenants that an admin can choose, as options; `chosen` is one of them even if it is gone. */
export function useTenantOptions(chosen) {
  const tenants = useApi("/v1/tenants", { limit: 1000 });
  const names = (tenants.data?.data ?? []).map((tenant) => tenant.name);
  return { ...tenants, options: [...new Set([...names, ...(chosen ? [chosen] : [])])].map((name) => [name, name]) };
}

/** The choice of a tenant, or of all; the address holds it. */
export function TenantChoice() {
  const chosen = param("tenant") ?? "";
  const { options } = useTenantOptions(chosen);
  return html`<${Select} label="Tenant" value=${chosen} onChange=${(tenant) => setParams({ tenant })} options=${[["", "All tenants"], ...options]} />`;
}

/** Look up the session; a link in the address signs in first, and is removed from it. */
export async function findOut() {
  const link = new URLSearchParams(location.hash.slice(1)).get("link");
  if (link) history.replaceState(null, "", location.pathname + location.search);
  try {
    if (link) await signIn(link).catch(keepSession);
    else me.value = await call("GET", "/v1/me");
  } catch (error) {
    if (link || error.status !== 401) meProblem.value = error;
    me.value = null;
    if (error.status === undefined) throw error;
  }
}

/** Stay with a session that is open: a link does not take its place. */
async function keepSession(error) {
  if (error.code !== "session.open") throw error;
  say(error.message);
  me.value = await call("GET", "/v1/me");
}

/** Begin a session with a key or a link. */
async function signIn(secret) {
  await call("POST", "/v1/session", { headers: { authorization: `Bearer ${secret}` } });
  meProblem.value = null;
  me.value = await call("GET", "/v1/me");
}

/** End the session; where the server cannot be reached, the page says that it did not end. */
export async function signOut() {
  try {
    await call("DELETE", "/v1/session");
    me.value = null;
  } catch (error) {
    if (error.status === undefined) throw error;
    say(`You are still signed in. ${error.message}`);
  }
}

/** Sign in with a key. */
export function SignInPage() {
  const [key, setKey] = useState("");
  const { error, send } = useSending(meProblem.value);
  const submit = (event) => {
    event?.preventDefault();
    return send(() => signIn(key.trim()));
  };
  const isPlain = /^[!-~]+$/.test(key.trim());
  return html`<main class="sign-in" tabindex="-1">
    <form class="card" onSubmit=${submit}>
      <img src="/static/manylora.svg" alt="" width="44" height="44" />
      <h1>Manylora</h1>
      <p class="quiet">Sign in with the admin key or a tenant's key. The session lasts 12 hours; the browser does not keep the key.</p>
      <${Field} label="Key" type="password" autocomplete="current-password" autofocus value=${key} name="key"
        onInput=${(event) => setKey(event.target.value)} error=${key && !isPlain ? "A key has no spaces or special letters in it." : null} />
      <${Problem} error=${error} />
      <${Button} kind="main wide" type="submit" disabled=${!isPlain} onClick=${submit}>Sign in<//>
      <p class="quiet">Without a key: on the server, <code>manylora dashboard</code> prints a link that signs in once.</p>
    </form>
  </main>`;
}
