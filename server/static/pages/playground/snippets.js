// The same call for a terminal or a program; the key stands in the environment, not in the text.

const origin = () => location.origin;

/** @param {import("./talk.js").Request} request */
export function asCurl({ path, tenant, body }) {
  const query = tenant ? `?tenant=${encodeURIComponent(tenant)}` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [`curl ${quoted(`${origin()}${path}${query}`)} \\`, `  -H "Authorization: Bearer $WEFT_KEY" \\`, `  -H "Content-Type: application/json" \\`, `  -d '${json}'`].join("\n");
}

/** For the package `openai`. @param {import("./talk.js").Request} request */
export function asPython({ path, tenant, body }) {
  const isChat = path.endsWith("/chat/completions");
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    `    base_url=${python(`${origin()}/v1`)},`,
    `    api_key=os.environ["WEFT_KEY"],`,
    ...(tenant ? [`    default_query={"tenant": ${python(tenant)}},`] : []),
    ")",
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...given,
    ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value as Python writes it; JSON's texts and numbers are Python's too. */
function python(value, indent = "") {
  if (Array.isArray(value)) return `[\n${value.map((one) => `${indent}    ${python(one, `${indent}    `)},\n`).join("")}${indent}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, indent)}`).join(", ")}}`;
  return JSON.stringify(value);
}
