// The same call for a terminal or a program; the key stands in the environment, not in the text.
import { html } from "../../lib.js";
import { param, setParams } from "../../place.js";
import { Code, Segmented } from "../../ui.js";

/** A request as code, in the language that the address names. @param {{request: import("./talk.js").Request}} props */
export function Snippet({ request }) {
  const shown = param("code") === "python" ? "python" : "curl";
  return html`<${Segmented} label="Language" value=${shown} onChange=${(code) => setParams({ code }, { replace: true })} options=${[["curl", "curl"], ["python", "Python (openai)"]]} />
    <${Code} text=${shown === "curl" ? asCurl(request) : asPython(request)} label=${shown === "curl" ? "As curl" : "As Python"} />`;
}

/** @param {import("./talk.js").Request} request */
function asCurl({ path, tenant, body }) {
  const query = tenant ? `?tenant=${encodeURIComponent(tenant)}` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [`curl ${quoted(`${location.origin}${path}${query}`)} \\`, `  -H "Authorization: Bearer $MANYLORA_KEY" \\`, `  -H "Content-Type: application/json" \\`, `  -d '${json}'`].join("\n");
}

/** For the package `openai`. @param {import("./talk.js").Request} request */
function asPython({ path, tenant, body }) {
  const isChat = path.endsWith("/chat/completions");
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    `    base_url=${python(`${location.origin}/v1`)},`,
    `    api_key=os.environ["MANYLORA_KEY"],`,
    ...(tenant ? [`    default_query={"tenant": ${python(tenant)}},`] : []),
    ")",
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...given,
    ")",
    `print(answer.choices[0].${!isChat ? "text" : body.tools ? "message" : "message.content"})`,
    "",
  ].join("\n");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const WORDS = { true: "True", false: "False", null: "None" };

/** A value as Python writes it; JSON's texts and numbers are Python's too. */
function python(value, indent = "") {
  if (Array.isArray(value)) return `[\n${value.map((one) => `${indent}    ${python(one, `${indent}    `)},\n`).join("")}${indent}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, indent)}`).join(", ")}}`;
  return WORDS[value] && typeof value !== "string" ? WORDS[value] : JSON.stringify(value);
}
