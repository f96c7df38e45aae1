// Who is signed in, and the page on which one does.
import { html, signal, useState } from "./lib.js";
import { call, sessionLost, useSending } from "./api.js";
import { Button, Field, Problem, say } from "./ui.js";

/** The answer of GET /v1/me; null while nobody is signed in, undefined until that is known. */
export const me = signal(undefined);

/** What kept the page from knowing who is there. */
export const meProblem = signal(null);

export const isAdmin = () => me.value?.role === "admin";
/** Whether whoever is signed in may do this: "infer", "adapters" or "usage". */
export const may = (scope) => isAdmin() || (me.value?.key?.scopes.includes(scope) ?? false);

/** Find out who is there; a link in the address signs in first, and is taken out of it. */
export async function findOut() {
  const link = new URLSearchParams(location.hash.slice(1)).get("link");
  try {
    if (link) {
      history.replaceState(null, "", location.pathname + location.search);
      await signIn(link);
      return;
    }
    me.value = await call("GET", "/v1/me");
  } catch (error) {
    if (error.status !== 401) {
      meProblem.value = error;
      if (error.status === undefined) throw error;
    }
    if (link) meProblem.value = error;
    me.value = null;
  }
}

/** Begin a session with a key or a link. */
async function signIn(secret) {
  await call("POST", "/v1/session", { headers: { authorization: `Bearer ${secret}` } });
  meProblem.value = null;
  me.value = await call("GET", "/v1/me");
}

/** End the session; where the server cannot be told, whoever is there stays signed in and is told so. */
export async function signOut() {
  try {
    await call("DELETE", "/v1/session");
    me.value = null;
  } catch (error) {
    if (error.status === undefined) throw error;
    say(`You are still signed in. ${error.message}`);
  }
}

/** Watch for answers that say that the session is over. */
export const watchSession = () =>
  sessionLost.subscribe((times) => {
    if (times && me.value) me.value = null;
  });

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
      <img src="/static/weft.svg" alt="" width="44" height="44" />
      <h1>Weft</h1>
      <p class="quiet">Sign in with the admin key or a tenant's key. It is exchanged for a session of 12 hours and kept nowhere.</p>
      <${Field} label="Key" type="password" autocomplete="current-password" autofocus value=${key} name="key"
        onInput=${(event) => setKey(event.target.value)} error=${key && !isPlain ? "A key has no spaces or special letters in it." : null} />
      <${Problem} error=${error} />
      <${Button} kind="main wide" type="submit" disabled=${!isPlain} onClick=${submit}>Sign in<//>
      <p class="quiet">No key at hand? On the server, <code>weft dashboard</code> prints a link that signs in once.</p>
    </form>
  </main>`;
}
