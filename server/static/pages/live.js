// The engine now: its requests, and how adapters and KV cache share one memory.
import { html } from "../lib.js";
import { time } from "../format.js";
import { Link } from "../place.js";
import { zoneShown } from "../range.js";
import { Badge, Button, Problem, Skeleton } from "../ui.js";
import { giveColours } from "./live/colours.js";
import { useFeed } from "./live/feed.js";
import { Residents, Since, Tiles } from "./live/figures.js";
import { Memory } from "./live/memory.js";
import { Steps } from "./live/steps.js";
import { Tenants } from "./live/tenants.js";

export const title = "Live";

export default function Live() {
  const feed = useFeed();
  const snapshot = feed.snapshot.value;
  if (snapshot) giveColours([...new Set([...snapshot.residents.map((one) => one.digest), ...(snapshot.batches?.adapters ?? []).map((one) => one.digest)])]);
  return html`<${Head} feed=${feed} snapshot=${snapshot} />
    <${Notices} feed=${feed} snapshot=${snapshot} />
    ${snapshot
      ? html`<${Tiles} snapshot=${snapshot} />
          <${Memory} snapshot=${snapshot} feed=${feed} />
          <${Tenants} snapshot=${snapshot} />
          <div class="columns live-columns"><${Steps} snapshot=${snapshot} /><${Since} snapshot=${snapshot} /></div>
          <${Residents} snapshot=${snapshot} />`
      : !feed.problem.value && html`<${Skeleton} />`}`;
}

function Head({ feed, snapshot }) {
  const [tone, word] = feed.isPaused.value ? ["", "Paused"] : { live: ["good", "Live"], connecting: ["", "Connecting"], broken: ["bad", "Reconnecting"] }[feed.state.value];
  return html`<div class="page-head">
    <div><h1>Live</h1>${snapshot && html`<p class="quiet">${snapshot.model} on ${snapshot.ready.device}, ${snapshot.ready.dtype}; context of ${snapshot.ready.max_model_len} tokens</p>`}</div>
    <div class="actions"><span role="status"><${Badge} tone=${tone} data-state=${feed.isPaused.value ? "paused" : feed.state.value}><span class="dot" /> ${word}<//></span>
      <${Button} onClick=${feed.pause} aria-pressed=${feed.isPaused.value}>${feed.isPaused.value ? "Continue" : "Pause"}<//></div>
  </div>`;
}

function Notices({ feed, snapshot }) {
  const heard = feed.heardAt.value;
  const clock = (at) => time(new Date(at).toISOString(), zoneShown(), { withSeconds: true }).slice(11);
  const isIdle = snapshot && !feed.problem.value && feed.state.value === "live" && snapshot.running === 0 && snapshot.waiting === 0;
  return html`
    ${feed.state.value === "broken" && html`<div class="notice bad" role="alert"><p><strong>The connection broke.</strong> ${heard ? `The page shows the state at ${clock(heard)}. ` : ""}It reconnects by itself.</p></div>`}
    ${feed.problem.value && html`<${Problem} error=${feed.problem.value} />`}
    ${feed.restartedAt.value && html`<div class="notice warn" role="status"><p><strong>The engine was restarted</strong> before ${clock(feed.restartedAt.value)}. Its memory is empty at first; adapters are loaded again when requests need them.</p>
      <${Button} kind="small" onClick=${() => (feed.restartedAt.value = null)}>OK<//></div>`}
    ${isIdle && html`<div class="notice" data-notice="idle"><p><strong>The engine is idle.</strong> ${snapshot.num_steps ? `Its last step ended at ${clock(heard - 1000 * snapshot.last_step_age_s)}.` : "It has had no request yet."}${" "}
      Send a request in the <${Link} to="/playground">Playground<//>, or run <code>weft demo</code> for a minute of traffic.</p></div>`}`;
}
