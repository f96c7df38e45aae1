// How programs call an adapter.
import { html } from "../../lib.js";
import { param, setParams } from "../../place.js";
import { Card, Code, Segmented } from "../../ui.js";

const QUESTION = "Where is my order?";
const SNIPPETS = {
  curl: (model) => `curl ${location.origin}/v1/chat/completions \\
  -H "Authorization: Bearer $WEFT_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{"model": "${model}",
       "messages": [{"role": "user", "content": "${QUESTION}"}]}'`,
  python: (model) => `import os

from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["WEFT_KEY"])
answer = client.chat.completions.create(
    model="${model}",
    messages=[{"role": "user", "content": "${QUESTION}"}],
)
print(answer.choices[0].message.content)`,
};

export function Snippets({ it }) {
  const shown = Object.hasOwn(SNIPPETS, param("code")) ? param("code") : "curl";
  const options = [{ value: "curl", label: "curl" }, { value: "python", label: "Python" }];
  return html`<${Card} title="Call it" actions=${html`<${Segmented} label="Language" value=${shown} options=${options} onChange=${(code) => setParams({ code })} />`}>
    <p class="quiet">With a key of ${it.tenant} that has the scope <code>infer</code>, in <code>WEFT_KEY</code>. <code>${it.name}@${it.version}</code> stays with this version.</p>
    <${Code} text=${SNIPPETS[shown](it.name)} label=${`Call it with ${shown}`} />
  <//>`;
}
