// One slim bar made of parts of a whole.
import { html } from "../lib.js";
import { count, percent } from "../format.js";

/** @param {{label: string, parts: {key: string, label: string, colour: string, value: number}[], format?: (value: number, share: number) => string}} props */
export function ShareBar({ label, parts, format = (value, share) => `${count(value)} · ${percent(share)}` }) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  let from = 0;
  return html`<div class="share-bar">
    <svg viewBox="0 0 100 1" preserveAspectRatio="none" height="12" role="img" aria-label=${`${label}: ${parts.map((part) => `${part.label} ${count(part.value)}`).join(", ")}`}>
      ${parts.map((part) => {
        const width = whole ? (100 * part.value) / whole : 0;
        from += width;
        return width > 0 && html`<rect key=${part.key} class=${part.colour} data-part=${part.key} data-value=${part.value} x=${from - width} y="0" width=${width} height="1" />`;
      })}
    </svg>
    <ul class="legend">
      ${parts.map((part) => html`<li key=${part.key} data-part=${part.key} data-value=${part.value}><span class=${`swatch ${part.colour}`} />${part.label}
        <span class="quiet">${format(part.value, whole ? part.value / whole : 0)}</span></li>`)}
    </ul>
  </div>`;
}
