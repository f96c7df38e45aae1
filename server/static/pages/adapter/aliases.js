// Names that stand for versions of an adapter.
import { html, useState } from "../../lib.js";
import { may } from "../../session.js";
import { Button, Card, Confirm, Empty, Field, Select, Table } from "../../ui.js";
import { meaningText } from "../../adapter_parts.js";
import { isName } from "../../upload_files.js";

export function Aliases({ it, versions, change }) {
  const [alias, setAlias] = useState("");
  const [version, setVersion] = useState("");
  const [doomed, setDoomed] = useState(null);
  const rows = Object.entries(it.aliases).filter(([name]) => name !== "default").map(([name, meaning]) => ({ name, meaning }));
  const options = versions.map((one) => ({ value: String(one.version), label: `Version ${one.version}` }));
  const isGood = isName(alias) && !/^\d+$/.test(alias) && alias !== "default";
  const point = (name, to) => change({ aliases: { [name]: Number(to) } }, `${it.name}@${name} is version ${to} now.`);
  const add = async (event) => {
    event.preventDefault();
    if (isGood && (await point(alias, version || options[0].value))) setAlias("");
  };
  const choice = ({ name, meaning }) => html`<${Select} label=${`Version of ${name}`} hideLabel value=${typeof meaning === "number" ? String(meaning) : ""} onChange=${(to) => to && point(name, to)}
    options=${[...(typeof meaning === "number" ? [] : [{ value: "", label: meaningText(meaning) }]), ...options]} />`;
  const columns = [
    { key: "alias", label: "Called as", isFixed: true, cell: ({ name }) => html`<code>${it.name}@${name}</code>` },
    { key: "meaning", label: "Version", isFixed: true, cell: (row) => (may("adapters") ? choice(row) : meaningText(row.meaning)) },
    ...(may("adapters") ? [{ key: "actions", label: "", isFixed: true, isNumber: true, cell: ({ name }) => html`<${Button} kind="small danger" aria-label=${`Remove the alias ${name}`} onClick=${() => setDoomed(name)}>Remove<//>` }] : []),
  ];
  return html`<${Card} title="Aliases" note="names that stay when versions change">
    ${rows.length
      ? html`<${Table} caption="Aliases" columns=${columns} rows=${rows} keyOf=${(row) => row.name} />`
      : html`<${Empty} title="No aliases yet.">An alias such as <code>${it.name}@prod</code> stands for a version until you change it.<//>`}
    ${may("adapters") && html`<form class="inline-form" onSubmit=${add}>
      <${Field} label="New alias" name="alias" placeholder="prod" autocomplete="off" value=${alias} onInput=${(event) => setAlias(event.target.value)}
        error=${alias && !isGood ? "A lower-case name, not a number, and not “default”." : null} />
      <${Select} label="Version" value=${version || options[0]?.value} onChange=${setVersion} options=${options} />
      <${Button} type="submit" disabled=${!isGood}>Add<//>
    </form>`}
    ${doomed && html`<${Confirm} title=${`Remove the alias ${doomed}?`} verb="Remove it" onClose=${() => setDoomed(null)}
      act=${() => change({ aliases: { [doomed]: null } }, `${it.name}@${doomed} was removed.`)}>
      <p>Requests for <code>${it.name}@${doomed}</code> are refused from then on. The version stays.</p><//>`}
  <//>`;
}
