// How the requests for an adapter are divided among its versions.
import { html, useState } from "../../lib.js";
import { may } from "../../session.js";
import { Button, Card, Select } from "../../ui.js";
import { ShareBar } from "../../charts/share_bar.js";
import { meaningText, shareText, sharesOf } from "../../adapter_parts.js";

const MOST_SHARES = 8;
const MOST_WEIGHT = 10_000;

export function Canary({ it, versions, change }) {
  const before = sharesOf(it.aliases.default ?? it.version);
  const [parts, setParts] = useState(() => startOf(before));
  const isWritable = may("adapters");
  const known = versions.map(({ version }) => version).sort((a, b) => b - a);
  const free = known.filter((version) => !parts.some((one) => one.version === version));
  const meaning = meaningOf(parts);
  const isChanged = JSON.stringify(meaning) !== JSON.stringify(meaningOf(startOf(before)));
  const isValid = parts.every(({ weight }) => Number.isInteger(weight) && weight >= 0 && weight <= MOST_WEIGHT) && parts.some(({ weight }) => weight > 0);
  const set = (version, weight) => setParts(parts.map((one) => (one.version === version ? { ...one, weight } : one)));
  const add = (version) => setParts([...parts.map((one) => ({ ...one, weight: parts.length === 1 ? 95 : one.weight })), { version, weight: 5 }]);
  const back = rollback(before, known);
  const apply = (to) => change({ aliases: { default: to } }, `Requests for ${it.name} use ${meaningText(to)} now.`);
  return html`<${Card} title="Split of requests" note=${`for ${it.name}, among its versions`}>
    <${Preview} parts=${isValid ? parts : before} />
    ${isWritable && (known.length > 1
      ? html`<div class="parts">${parts.map((one) => html`<div class="part" key=${one.version}>
            <label class="field inline"><span>Weight of version ${one.version}</span>
              <input type="number" min="0" max=${MOST_WEIGHT} step="1" value=${one.weight} onInput=${(event) => set(one.version, event.target.valueAsNumber)} /></label>
            ${parts.length > 1 && html`<${Button} kind="small" aria-label=${`Leave version ${one.version} out`} onClick=${() => setParts(parts.filter((other) => other !== one))}>Leave out<//>`}
          </div>`)}
          ${parts.length === 2 && html`<label class="field slider"><span>Slide from version ${parts[0].version} to version ${parts[1].version}</span>
            <input type="range" min="0" max="100" step="1" value=${Math.round(sharesTo(parts) * 100)}
              onInput=${(event) => setParts([{ ...parts[0], weight: 100 - event.target.valueAsNumber }, { ...parts[1], weight: event.target.valueAsNumber }])} /></label>`}
          ${free.length > 0 && parts.length < MOST_SHARES && html`<${Select} label="Add a version" value="" onChange=${(version) => version && add(Number(version))}
            options=${[{ value: "", label: "Choose a version" }, ...free.map((version) => ({ value: String(version), label: `Version ${version}` }))]} />`}
        </div>
        ${!isValid && html`<p class="field-error">Weights are whole numbers from 0 to ${MOST_WEIGHT}, at least one above 0.</p>`}
        <div class="actions">
          <${Button} kind="main" disabled=${!isChanged || !isValid} onClick=${() => apply(meaning)}>Apply${isChanged && isValid ? `: ${splitText(parts)}` : ""}<//>
          ${isChanged && html`<${Button} onClick=${() => setParts(startOf(before))}>Reset<//>`}
          ${back && html`<${Button} onClick=${() => apply(back.version)}>${back.label}<//>`}
        </div>`
      : html`<p class="quiet">There is only one version. Upload another one without making it current; then you can send it a part of the requests here.</p>`)}
  <//>`;
}

function Preview({ parts }) {
  const shown = parts.filter(({ weight }) => weight > 0);
  const shares = shown.map((one) => ({ key: String(one.version), label: `Version ${one.version}`, colour: colour(one), value: one.weight }));
  return html`<${ShareBar} label="Share of the requests" parts=${shares} format=${(_, share) => shareText(share)} />
    <p class="unseen" data-split>${splitText(parts)}</p>`;
}

/** "95% / 5%" */
const splitText = (parts) => parts.filter(({ weight }) => weight > 0).map((one) => shareText(shareOf(one, parts))).join(" / ");

/** The same colour as in the chart of usage by version. */
const colour = ({ version }) => `s${(version - 1) % 8}`;

/** Weights as they are; where one version has all, of 100. */
const startOf = (shares) => shares.map(({ version, weight }) => ({ version, weight: shares.length === 1 ? 100 : weight }));

const shareOf = (one, parts) => one.weight / parts.reduce((sum, { weight }) => sum + weight, 0);

const sharesTo = ([first, second]) => (first.weight + second.weight ? second.weight / (first.weight + second.weight) : 0) || 0;

/** What PATCH takes: a version, or weights by version. */
function meaningOf(parts) {
  const given = parts.filter(({ weight }) => weight > 0).sort((a, b) => a.version - b.version);
  return given.length === 1 ? given[0].version : Object.fromEntries(given.map(({ version, weight }) => [version, weight]));
}

/** What “roll back” means: from several versions to the one with most requests, from one version to the one before it. */
function rollback(before, known) {
  if (!before.length) return null;
  const main = before[0].version;
  if (before.length > 1) return { version: main, label: `Roll back to version ${main} alone` };
  const older = known.find((version) => version < main);
  return older === undefined ? null : { version: older, label: `Roll back to version ${older}` };
}
