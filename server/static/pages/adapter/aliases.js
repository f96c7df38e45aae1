// Names for versions, beside the plain one.
import { html, useState } from "../../lib.js";
import { may } from "../../session.js";
import { Button, Card, Confirm, Empty, Field, Select } from "../../ui.js";
import { meaningText } from "../../adapter_parts.js";
import { isName } from "../../upload_files.js";

export function Aliases({ it, versions, change }) {
  const [alias, setAlias] = useState("");
  const [version, setVersion] = useState("");
  const [doomed, setDoomed] = useState(null);
  const names = Object.entries(it.aliases).filter(([name]) => name !== "default");
  const options = versions.map((one) => ({ value: String(one.version), label: `Version ${one.version}` }));
  const isGood = isName(alias) && !/^\d+$/.test(alias) && alias !== "default";
  const point = (name, to) => change({ aliases: { [name]: Number(to) } }, `${it.name}@${name} now means version ${to}.`);
  const add = async (event) => {
    event.preventDefault();
    if (isGood && (await point(alias, version || options[0].value))) setAlias("");
  };
  return html`<${Card} title="Aliases" note="names that stay when versions change">
    ${names.length
      ? html`<div class="table-box" tabindex="0" role="region" aria-label="Aliases"><table><caption class="unseen">Aliases</caption>
          <thead><tr><th scope="col">Called as</th><th scope="col">Means</th>${may("adapters") && html`<th scope="col"><span class="unseen">Actions</span></th>`}</tr></thead>
          <tbody>${names.map(([name, meaning]) => html`<tr key=${name} data-alias=${name}>
            <td><code>${it.name}@${name}</code></td>
            <td>${may("adapters")
              ? html`<${Select} label=${`What ${name} means`} hideLabel value=${typeof meaning === "number" ? String(meaning) : ""} onChange=${(to) => to && point(name, to)}
                  options=${[...(typeof meaning === "number" ? [] : [{ value: "", label: meaningText(meaning) }]), ...options]} />`
              : meaningText(meaning)}</td>
            ${may("adapters") && html`<td class="number"><${Button} kind="small danger" aria-label=${`Remove the alias ${name}`} onClick=${() => setDoomed(name)}>Remove<//></td>`}
          </tr>`)}</tbody></table></div>`
      : html`<${Empty} title="No aliases yet.">An alias such as <code>${it.name}@prod</code> means a version until you point it elsewhere.<//>`}
    ${may("adapters") && html`<form class="inline-form" onSubmit=${add}>
      <${Field} label="New alias" name="alias" placeholder="prod" autocomplete="off" value=${alias} onInput=${(event) => setAlias(event.target.value)}
        error=${alias && !isGood ? "A lower-case name that is no number, and not default." : null} />
      <${Select} label="Means" value=${version || options[0]?.value} onChange=${setVersion} options=${options} />
      <${Button} type="submit" disabled=${!isGood}>Add<//>
    </form>`}
    ${doomed && html`<${Confirm} title=${`Remove the alias ${doomed}?`} verb="Remove it" onClose=${() => setDoomed(null)}
      act=${() => change({ aliases: { [doomed]: null } }, `${it.name}@${doomed} is gone.`)}>
      <p>Requests for <code>${it.name}@${doomed}</code> are refused from then on. The version stays.</p><//>`}
  <//>`;
}
