// One model's column: what it was asked and what it answered.
import { html, useState } from "../../lib.js";
import { count, seconds } from "../../format.js";
import { Badge, Button, Code, Dialog, Empty, Problem, Segmented } from "../../ui.js";
import { asCurl, asPython } from "./snippets.js";

const STATES = { device: ["good", "on the device"], host: ["info", "loaded from host memory"], stored: ["warn", "loaded from the blob store"] };

/** @param {{model: string, talk: object, next: () => import("./talk.js").Request, onModel: (name: string) => void, onRemove: (() => void)|null,
 *   onCompletion: () => void, index: number}} props `next` is what would be sent now. */
export function Column({ model, talk, next, onModel, onRemove, onCompletion, index }) {
  const [isCoding, setCoding] = useState(false);
  const exchanges = talk.exchanges.value;
  return html`<section class="card talk" aria-label=${`Answers of ${model}`} data-model=${model}>
    <header class="talk-head">
      <input type="text" list="models" aria-label=${`Model ${index + 1}`} value=${model} spellcheck="false" autocomplete="off"
        onChange=${(event) => (event.target.value.trim() ? onModel(event.target.value.trim()) : (event.target.value = model))} />
      ${onRemove && html`<button type="button" class="icon-button" aria-label=${`Remove ${model}`} onClick=${onRemove}>×</button>`}
    </header>
    <div class="exchanges" aria-live="polite" aria-busy=${talk.isBusy.value}>
      ${exchanges.length ? exchanges.map((one, at) => html`<${Exchange} key=${at} of=${one} onCompletion=${onCompletion} />`) : html`<${Empty} title="No request yet." />`}
    </div>
    <footer class="actions">
      ${talk.isBusy.value
        ? html`<${Button} kind="small" onClick=${talk.stop} aria-label=${`Stop ${model}`}>Stop<//>`
        : html`<${Button} kind="small" onClick=${talk.clear} disabled=${!exchanges.length} aria-label=${`Clear ${model}`}>Clear<//>`}
      <${Button} kind="small" onClick=${() => setCoding(true)} aria-label=${`Call ${model} from code`}>Code<//>
    </footer>
    ${isCoding && html`<${CodeDialog} model=${model} request=${exchanges.at(-1)?.request ?? next()} onClose=${() => setCoding(false)} />`}
  </section>`;
}

function Exchange({ of: one, onCompletion }) {
  const isAsleep = one.state === "waiting";
  return html`<article class="exchange" data-state=${one.state}>
    <p class="asked">${one.prompt}</p>
    <div class=${`answer ${one.state}`} data-answer>${one.text}${isAsleep && html`<span class="quiet">waiting for the first token…</span>`}</div>
    ${one.error && html`<${Problem} error=${one.error} />`}
    ${one.error?.code === "no_chat_template" && html`<p><${Button} kind="small" onClick=${onCompletion}>Use completions instead<//></p>`}
    ${!isAsleep && one.state !== "failed" && html`<${Figures} of=${one} />`}
  </article>`;
}

function Figures({ of: one }) {
  const { usage } = one;
  const [tone, words] = STATES[one.residency] ?? [];
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const ends = one.state === "stopped" ? "stopped by you" : one.finish === "length" ? "cut at max tokens" : "";
  return html`<p class="figures">
    <span class="by" data-figure="adapter">${one.adapter ?? "base"}</span>
    ${words && html`<${Badge} tone=${tone} data-figure="residency" data-state=${one.residency}>${words}<//>`}
    <span title="Time to the first token"><b data-figure="ttft">${seconds(one.ttftS)}</b> to first</span>
    <span title="Tokens per second after the first"><b data-figure="pace">${one.pace ? count(Math.round(one.pace)) : "–"}</b> tokens/s</span>
    ${usage && html`<span><b data-figure="in" data-value=${usage.prompt_tokens}>${count(usage.prompt_tokens)}</b> in <span class="quiet">(<span data-figure="cached" data-value=${cached}>${count(cached)}</span> cached)</span></span>
      <span><b data-figure="out" data-value=${usage.completion_tokens}>${count(usage.completion_tokens)}</b> out</span>`}
    ${ends && html`<${Badge} tone="warn">${ends}<//>`}
  </p>`;
}

function CodeDialog({ model, request, onClose }) {
  const [language, setLanguage] = useState("curl");
  return html`<${Dialog} title=${`Call ${model}`} onClose=${onClose}>
    <${Segmented} label="Language" value=${language} onChange=${setLanguage} options=${[{ value: "curl", label: "curl" }, { value: "python", label: "Python (openai)" }]} />
    <${Code} text=${language === "curl" ? asCurl(request) : asPython(request)} label=${language === "curl" ? "As curl" : "As Python"} />
    <p class="quiet">Set your key first: <code>export WEFT_KEY=…</code></p>
  <//>`;
}
