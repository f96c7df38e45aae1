// One prompt to several models, side by side.
import { html, useEffect, useRef, useState } from "../lib.js";
import { param } from "../place.js";
import { isAdmin, may } from "../session.js";
import { Button, Card, Field, LacksScope, Problem, Segmented, Skeleton } from "../ui.js";
import { MOST_MODELS, choose, chooseModels, chosen, modelsShown, useModels } from "./playground/choices.js";
import { Column } from "./playground/column.js";
import { makeTalk, requestOf } from "./playground/talk.js";

export const title = "Playground";

export default function Playground() {
  const head = html`<div class="page-head"><div><h1>Playground</h1><p class="quiet">Send one prompt to the base and to adapters, and compare the answers.</p></div></div>`;
  if (!may("infer")) return html`${head}<${LacksScope} scope="infer" title="This key may not send requests." />`;
  return html`${head}<${Asking} key=${param("tenant") ?? ""} />`;
}

function Asking() {
  const found = useModels();
  const models = modelsShown(found.names);
  const talks = useTalks(models);
  const [prompt, setPrompt] = useState(chosen("prompt"));
  const [system, setSystem] = useState(chosen("system"));
  const fields = (model) => ({
    model, prompt, system, mode: chosen("mode"), maxTokens: chosen("max_tokens"), temperature: chosen("temperature"), seed: chosen("seed"),
    tenant: isAdmin() ? param("tenant") : null,
  });
  const next = (index) => requestOf(fields(models[index]), talks[index].exchanges.value);
  const isBusy = talks.some((talk) => talk.isBusy.value);
  const canSend = prompt.trim() !== "" && models.length > 0;
  const [isWanted, setWanted] = useState(false);
  const sendAll = () => {
    setWanted(prompt.trim() !== "" && !models.length && found.isLoading); // then it is sent as soon as the models are known
    if (!canSend) return;
    chooseModels(models, { replace: true });
    choose("prompt", prompt);
    talks.forEach((talk, index) => void talk.ask(prompt, next(index)));
  };
  useEffect(() => void (isWanted && models.length && sendAll()), [isWanted, models.length]);
  const onKey = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    sendAll();
  };
  const free = found.names.find((name) => !models.includes(name)) ?? found.names[0];
  return html`<datalist id="models">${found.names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    <${Card}>
      <form class="composer" onSubmit=${(event) => event.preventDefault()} onKeyDown=${onKey}>
        ${chosen("mode") === "chat" && html`<details open=${chosen("system") !== ""}><summary>System prompt</summary>
          <textarea aria-label="System prompt" name="system" value=${system} onInput=${(event) => setSystem(event.target.value)} onChange=${(event) => choose("system", event.target.value)} /></details>`}
        <${Field} label="Prompt">${(id) => html`<textarea id=${id} name="prompt" value=${prompt} placeholder="Ask something…"
          onInput=${(event) => setPrompt(event.target.value)} onChange=${(event) => choose("prompt", event.target.value)} />`}<//>
        <div class="parameters">
          <div class="field"><span class="label">Call</span><${Segmented} label="Kind of call" value=${chosen("mode")} onChange=${(mode) => choose("mode", mode)} options=${[{ value: "chat", label: "Chat" }, { value: "completion", label: "Completion" }]} /></div>
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
    <${Problem} error=${found.error} retry=${found.reload} />
    <div class="talks" data-columns=${models.length}>
      ${models.map((model, index) => html`<${Column} key=${`${index} ${model}`} index=${index} model=${model} talk=${talks[index]} next=${() => next(index)}
        onModel=${(name) => chooseModels(models.map((one, at) => (at === index ? name : one)))}
        onRemove=${models.length > 1 ? () => chooseModels(models.filter((_, at) => at !== index)) : null} onCompletion=${() => choose("mode", "completion")} />`)}
      ${!models.length && (found.isLoading ? html`<${Skeleton} lines=${2} />` : null)}
    </div>
    <p class="actions"><${Button} disabled=${models.length >= MOST_MODELS || !free} onClick=${() => chooseModels([...models, free])}>Add a model<//>
      <span class="quiet">${models.length >= MOST_MODELS ? "At most four models." : html`A model is the base, an adapter, or one of its versions (<code>name@3</code>) or aliases (<code>name@prod</code>).`}</span></p>`;
}

function Parameter({ name, label, ...rest }) {
  return html`<${Field} label=${label} type="number" name=${name} value=${chosen(name)} ...${rest} onChange=${(event) => choose(name, event.target.value)} />`;
}

/** A conversation for each column; another model in a column starts a new one. */
function useTalks(models) {
  const kept = useRef([]);
  kept.current = takeAlong(kept.current, models);
  useEffect(() => () => kept.current.forEach(({ talk }) => talk.stop()), []);
  return kept.current.map(({ talk }) => talk);
}

/** The conversations of the models that are still there, in the new order. */
function takeAlong(before, models) {
  const left = [...before];
  const now = models.map((model) => {
    const at = left.findIndex((one) => one.model === model);
    return at < 0 ? { model, talk: makeTalk() } : left.splice(at, 1)[0];
  });
  left.forEach(({ talk }) => talk.stop());
  return now;
}
