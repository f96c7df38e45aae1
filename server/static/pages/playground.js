// One prompt to several models, side by side.
import { html, useEffect, useRef, useState } from "../lib.js";
import { useApi } from "../api.js";
import { count, seconds } from "../format.js";
import { param, paramAll, setParams } from "../place.js";
import { isAdmin } from "../session.js";
import { Badge, Button, Card, Dialog, Empty, Field, FirstProblem, PageHead, Problem, Segmented, Skeleton, openDialog } from "../ui.js";
import { Snippet } from "./playground/snippets.js";
import { isObject, misfit, parsed } from "./playground/schema.js";
import { makeTalk, messagesOf } from "./playground/talk.js";

const MOST_MODELS = 4;
const LONGEST_IN_ADDRESS = 1500;
const DEFAULTS = { mode: "chat", max_tokens: "128", temperature: "0", seed: "", system: "", prompt: "", tools: "", schema: "" };

/** A parameter as it is in the address, or what it is otherwise. */
const chosen = (name) => param(name, DEFAULTS[name]);

/** Remember a choice; what is as usual, or too long, is left out of the address. */
const choose = (name, value) => setParams({ [name]: value === DEFAULTS[name] || value.length > LONGEST_IN_ADDRESS ? null : value }, { replace: true });

const chooseModels = (models, options) => setParams({ model: models }, options);

/**
 * The models that the session may use, by the names that the API takes.
 * @returns {{names: string[], answers: object[], isLoading: boolean}} `answers` of the API, of which one may be a problem.
 */
function useModels() {
  const tenant = isAdmin() ? param("tenant") : null;
  // An admin who acts for no tenant writes the owner in front of each adapter.
  const isEverybody = isAdmin() && !tenant;
  const models = useApi("/v1/models", { tenant });
  const adapters = useApi(isEverybody ? "/v1/adapters" : null, { tenant: "*", limit: 1000 }, { all: true });
  const listed = models.data?.data ?? [];
  const own = [...listed].sort((a, b) => (a.parent !== null) - (b.parent !== null)).map((one) => one.id); // the base first
  const everybodys = isEverybody ? (adapters.data?.data ?? []).map((one) => `${one.tenant}/${one.name}`) : [];
  return { names: [...new Set([...own, ...everybodys])], answers: [models, adapters], isLoading: models.isLoading || (isEverybody && adapters.isLoading) };
}

/** What the fields for tools and schema say, each with its error. */
function extrasOf({ tools, schema }) {
  return {
    tools: parsed(tools, (value) => Array.isArray(value) && value.every((one) => isObject(one?.function)), 'Tools are a JSON array of {"type": "function", "function": {"name": …, "parameters": …}}.'),
    schema: parsed(schema, isObject, "A JSON schema is an object."),
  };
}

/** What would be sent to a model with the messages `asked`, after the exchanges that went well. @returns {import("./playground/talk.js").Request} */
function requestOf(model, asked, system, extras, exchanges) {
  const tenant = isAdmin() ? param("tenant") : null;
  const given = ["max_tokens", "temperature", "seed"].filter((name) => chosen(name) !== "").map((name) => [name, Number(chosen(name))]);
  const shared = { model, ...Object.fromEntries(given) };
  if (chosen("mode") === "completion") return { path: "/v1/completions", tenant, body: { ...shared, prompt: asked[0].content } };
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...messagesOf(exchanges, asked), ...asked];
  const tools = extras.tools.value?.length ? { tools: extras.tools.value } : {};
  const format = extras.schema.value && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: extras.schema.value, strict: true } } };
  return { path: "/v1/chat/completions", tenant, body: { ...shared, messages, ...tools, ...format } };
}

export default function Playground() {
  return html`<${PageHead} title="Playground" about="Send one prompt to the base and to adapters, and compare the answers." />
    <${Asking} key=${param("tenant") ?? ""} />`;
}

function Asking() {
  const found = useModels();
  const wanted = paramAll("model").slice(0, MOST_MODELS);
  const models = wanted.length ? wanted : found.names.slice(0, 3); // the base and the first two adapters
  const talks = useTalks(models);
  const [texts, setTexts] = useState(() => Object.fromEntries(["prompt", "system", "tools", "schema"].map((name) => [name, chosen(name)])));
  const { prompt, system } = texts;
  const extras = extrasOf(texts);
  const isWrong = chosen("mode") === "chat" && Boolean(extras.tools.error || extras.schema.error);
  const next = (index, asked = [{ role: "user", content: prompt }]) => requestOf(models[index], asked, system, extras, talks[index].exchanges.value);
  const isBusy = talks.some((talk) => talk.isBusy.value);
  const canSend = prompt.trim() !== "" && models.length > 0 && !isWrong;
  const [isWanted, setWanted] = useState(false);
  const sendAll = () => {
    setWanted(prompt.trim() !== "" && !models.length && found.isLoading); // then it is sent as soon as the models are known
    if (!canSend) return;
    chooseModels(models, { replace: true });
    choose("prompt", prompt);
    talks.forEach((talk, index) => void talk.ask([{ role: "user", content: prompt }], next(index)));
  };
  useEffect(() => void (isWanted && models.length && sendAll()), [isWanted, models.length]);
  const onKey = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    sendAll();
  };
  /** What makes a field for one of the texts, which goes into the address when it is left. */
  const field = (name) => ({ name, value: texts[name], onInput: ({ target }) => setTexts((before) => ({ ...before, [name]: target.value })), onChange: ({ target }) => choose(name, target.value) });
  const free = found.names.find((name) => !models.includes(name)) ?? found.names[0];
  return html`<datalist id="models">${found.names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    <${Card}>
      <form class="composer" onSubmit=${(event) => event.preventDefault()} onKeyDown=${onKey}>
        ${chosen("mode") === "chat" && html`<details open=${chosen("system") !== ""}><summary>System prompt</summary>
          <textarea aria-label="System prompt" ...${field("system")} /></details>
          <details class="extras" open=${chosen("tools") + chosen("schema") !== ""}><summary>Tools and schema</summary><div>
            <${Json} label="Tools" of=${extras.tools} ...${field("tools")} placeholder='[{"type": "function", "function": {"name": "where_is", "parameters": …}}]' />
            <${Json} label="Schema of the answer" of=${extras.schema} ...${field("schema")} placeholder='{"type": "object", "properties": …}' />
          </div></details>`}
        <${Field} label="Prompt">${(id) => html`<textarea id=${id} placeholder="Ask something…" ...${field("prompt")} />`}<//>
        <div class="parameters">
          <div class="field"><span class="label">Call</span><${Segmented} label="Kind of call" value=${chosen("mode")} onChange=${(mode) => choose("mode", mode)} options=${[["chat", "Chat"], ["completion", "Completion"]]} /></div>
          <${Parameter} name="max_tokens" label="Max tokens" min="1" step="1" />
          <${Parameter} name="temperature" label="Temperature" min="0" max="2" step="0.1" />
          <${Parameter} name="seed" label="Seed" step="1" placeholder="random" />
          <div class="actions">
            ${isBusy
              ? html`<${Button} onClick=${() => talks.forEach((talk) => talk.stop())}>Stop all<//>`
              : html`<${Button} onClick=${() => talks.forEach((talk) => talk.clear())} disabled=${talks.every((talk) => !talk.exchanges.value.length)}>Clear all<//>`}
            <${Button} kind="main" disabled=${!canSend || isBusy} onClick=${sendAll} title="Ctrl+Enter">Send to all<//>
          </div>
        </div>
      </form>
    <//>
    <${FirstProblem} of=${found.answers} />
    <div class="talks" data-columns=${models.length}>
      ${models.map((model, index) => html`<${Column} key=${`${index} ${model}`} index=${index} model=${model} talk=${talks[index]} next=${() => next(index)}
        onResults=${(results) => void talks[index].ask(results, next(index, results))}
        onModel=${(name) => chooseModels(models.map((one, at) => (at === index ? name : one)))}
        onRemove=${models.length > 1 ? () => chooseModels(models.filter((_, at) => at !== index)) : null} onCompletion=${() => choose("mode", "completion")} />`)}
      ${!models.length && (found.isLoading ? html`<${Skeleton} lines=${2} />` : null)}
    </div>
    <p class="actions"><${Button} disabled=${models.length >= MOST_MODELS || !free} onClick=${() => chooseModels([...models, free])}>Add a model<//>
      <span class="quiet">${models.length >= MOST_MODELS ? "At most four models." : html`A model is the base, an adapter, or one of its versions (<code>name@3</code>) or aliases (<code>name@prod</code>).`}</span></p>`;
}

const Parameter = ({ name, label, ...rest }) => html`<${Field} label=${label} type="number" name=${name} value=${chosen(name)} ...${rest} onChange=${(event) => choose(name, event.target.value)} />`;

/** A field for JSON; what is wrong with it stands below. */
const Json = ({ label, of: { error }, ...rest }) => html`<${Field} label=${label} error=${error}>${(id) => html`<textarea id=${id} spellcheck="false" aria-invalid=${error ? "true" : undefined}
  aria-describedby=${error ? `${id}-hint` : undefined} ...${rest} />`}<//>`;

/** A conversation for each column. It stays with its model when columns move, and stops when the model is gone. */
function useTalks(models) {
  const kept = useRef(new Map()).current;
  const keys = models.map((model, at) => `${model} ${models.slice(0, at).filter((one) => one === model).length}`);
  for (const key of [...kept.keys()].filter((one) => !keys.includes(one))) {
    kept.get(key).stop();
    kept.delete(key);
  }
  useEffect(() => () => kept.forEach((talk) => talk.stop()), []);
  return keys.map((key) => kept.get(key) ?? kept.set(key, makeTalk()).get(key));
}

const STATES = { device: ["good", "on the device"], host: ["info", "loaded from host memory"], stored: ["warn", "loaded from the blob store"] };

/** One model: what it was asked and what it answered.
 * @param {{model: string, talk: object, next: () => import("./playground/talk.js").Request, onResults: (results: object[]) => void, onModel: (name: string) => void, onRemove: (() => void)|null,
 *   onCompletion: () => void, index: number}} props `next` is what would be sent now. */
function Column({ model, talk, next, onResults, onModel, onRemove, onCompletion, index }) {
  const exchanges = talk.exchanges.value;
  const last = exchanges.findLastIndex((one) => one.state !== "failed");
  const showCode = () => openDialog(CodeDialog, { model, request: exchanges.at(-1)?.request ?? next() });
  return html`<section class="card talk" aria-label=${`Answers of ${model}`} data-model=${model}>
    <header class="talk-head">
      <input type="text" list="models" aria-label=${`Model ${index + 1}`} value=${model} spellcheck="false" autocomplete="off"
        onChange=${(event) => (event.target.value.trim() ? onModel(event.target.value.trim()) : (event.target.value = model))} />
      ${onRemove && html`<button type="button" class="icon-button" aria-label=${`Remove ${model}`} onClick=${onRemove}>×</button>`}
    </header>
    <div class="exchanges" aria-live="polite" aria-busy=${talk.isBusy.value}>
      ${exchanges.length ? exchanges.map((one, at) => html`<${Exchange} key=${at} of=${one} onCompletion=${onCompletion} onResults=${at === last && one.state === "done" && !talk.isBusy.value ? onResults : null} />`) : html`<${Empty} title="No request yet." />`}
    </div>
    <footer class="actions">
      ${talk.isBusy.value
        ? html`<${Button} kind="small" onClick=${talk.stop} aria-label=${`Stop ${model}`}>Stop<//>`
        : html`<${Button} kind="small" onClick=${talk.clear} disabled=${!exchanges.length} aria-label=${`Clear ${model}`}>Clear<//>`}
      <${Button} kind="small" onClick=${showCode} aria-label=${`Call ${model} from code`}>Code<//>
    </footer>
  </section>`;
}

function Exchange({ of: one, onCompletion, onResults }) {
  const isAsleep = one.state === "waiting";
  return html`<article class="exchange" data-state=${one.state}>
    ${one.asked.map((message) => html`<p class="asked">${message.role === "tool" && html`<span class="quiet">result: </span>`}${message.content}</p>`)}
    ${one.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div data-reasoning>${one.reasoning}</div></details>`}
    ${(one.text || !one.calls.length) && html`<div class=${`answer ${one.state}`} data-answer>${one.text}${isAsleep && html`<span class="quiet">waiting for the first token…</span>`}</div>`}
    ${one.calls.length > 0 && html`<${Calls} of=${one.calls} onResults=${onResults} />`}
    ${one.error && html`<${Problem} error=${one.error} />`}
    ${one.error?.code === "no_chat_template" && html`<p><${Button} kind="small" onClick=${onCompletion}>Use completions instead<//></p>`}
    ${!isAsleep && one.state !== "failed" && html`<${Figures} of=${one} />`}
  </article>`;
}

/** The calls of an answer, and fields for their results where they are awaited. */
function Calls({ of: calls, onResults }) {
  const [results, setResults] = useState({});
  const sendResults = () => onResults(calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: results[call.id] })));
  return html`<div class="calls">
    ${calls.map((call) => html`<div class="call" key=${call.id} data-call=${call.name}><b>${call.name}</b> <code>${call.arguments}</code>
      ${onResults && html`<input type="text" aria-label=${`Result of ${call.name}`} placeholder="its result" value=${results[call.id] ?? ""} onInput=${(event) => setResults({ ...results, [call.id]: event.target.value })} />`}
    </div>`)}
    ${onResults && html`<${Button} kind="small" disabled=${calls.some((call) => !results[call.id])} onClick=${sendResults}>Send the results<//>`}
  </div>`;
}

/** Whether a whole answer fits the schema that was sent with it. */
function Fit({ of: one }) {
  const schema = one.request.body.response_format?.json_schema.schema;
  if (!schema || one.state !== "done" || one.calls.length) return null;
  const answer = parsed(one.text, () => true);
  const fault = answer.error ?? ("value" in answer ? misfit(answer.value, schema) : "The answer is empty.");
  return html`<${Badge} tone=${fault ? "bad" : "good"} data-figure="fit" title=${fault ?? "Checked in this page: types, enum, required and unknown properties."}>${fault ? "does not fit the schema" : "fits the schema"}<//>`;
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
    <${Fit} of=${one} />
  </p>`;
}

const CodeDialog = ({ model, request, onClose }) => html`<${Dialog} title=${`Call ${model}`} onClose=${onClose}>
  <${Snippet} request=${request} />
  <p class="quiet">Set your key first: <code>export MANYLORA_KEY=…</code></p>
<//>`;
