// How programs call an adapter.
import { html } from "../../lib.js";
import { param, setParams } from "../../place.js";
import { Card, Code, Segmented } from "../../ui.js";
import { asCurl, asPython } from "../playground/snippets.js";

const LANGUAGES = { curl: { label: "curl", of: asCurl }, python: { label: "Python", of: asPython } };

export function Snippets({ it }) {
  const shown = Object.hasOwn(LANGUAGES, param("code")) ? param("code") : "curl";
  const options = Object.entries(LANGUAGES).map(([value, { label }]) => ({ value, label }));
  const body = { model: it.name, messages: [{ role: "user", content: "Where is my order?" }] };
  return html`<${Card} title="Call it" actions=${html`<${Segmented} label="Language" value=${shown} options=${options} onChange=${(code) => setParams({ code })} />`}>
    <p class="quiet">Set <code>WEFT_KEY</code> to a key of ${it.tenant} with the scope <code>infer</code>. <code>${it.name}@${it.version}</code> always means this version.</p>
    <${Code} text=${LANGUAGES[shown].of({ path: "/v1/chat/completions", tenant: null, body })} label=${`Call it with ${shown}`} />
  <//>`;
}
