// What the pages about adapters share.
import { html, useEffect, useState } from "./lib.js";
import { useSending } from "./api.js";
import { Badge, say } from "./ui.js";

const PLACES = {
  device: { tone: "good", title: "On the device: the next request starts at once." },
  host: { tone: "info", title: "In host memory: the next request copies it to the device first." },
  stored: { tone: "", title: "Only in the blob store: the next request loads it first." },
};
const LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/** Where an adapter is. */
export const Residency = ({ of: place }) => html`<${Badge} tone=${PLACES[place].tone} title=${PLACES[place].title} data-residency=${place}>${place}<//>`;

/** ["q_proj", "v_proj"] -> q, v; all seven -> all linear */
export function targetsText(modules) {
  if (LINEAR.every((name) => modules.includes(name))) return "all linear";
  return modules.map((name) => name.replace(/_proj$/, "")).join(", ");
}

/** The versions that an alias stands for, with their shares: {2: 95, 3: 5} -> [{version: 2, share: 0.95}, …], the largest first. */
export function sharesOf(meaning) {
  if (meaning === undefined || meaning === null) return [];
  const weights = typeof meaning === "number" ? { [meaning]: 1 } : meaning;
  const sum = Object.values(weights).reduce((a, b) => a + b, 0);
  return Object.entries(weights)
    .map(([version, weight]) => ({ version: Number(version), weight, share: weight / sum }))
    .sort((a, b) => b.weight - a.weight || b.version - a.version);
}

/** 0.95 -> 95%, 0.005 -> 0.5% */
export const shareText = (share) => `${Number((share * 100).toFixed(share < 0.1 ? 2 : 1))}%`;

/** What an alias means, in words. */
export function meaningText(meaning) {
  const shares = sharesOf(meaning);
  if (shares.length === 1) return `version ${shares[0].version}`;
  return shares.map(({ version, share }) => `${shareText(share)} version ${version}`).join(", ");
}

/** Changes that may be refused: `run` makes one, says what was done, and reloads. */
export function useChange(reload) {
  const { error, send } = useSending();
  const run = async (change, done) => {
    if (!(await send(change))) return false;
    if (done) say(done);
    reload();
    return true;
  };
  return { error, run };
}

/** Call `act` with what is dropped anywhere on the page; says whether files hang over it. */
export function useDrops(act) {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    if (!act) return undefined;
    const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const over = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event) => event.relatedTarget === null && setOver(false);
    const drop = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(false);
      act(event.dataTransfer);
    };
    const heard = { dragover: over, dragleave: leave, drop };
    for (const [name, listener] of Object.entries(heard)) addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(heard)) removeEventListener(name, listener);
    };
  }, [act]);
  return isOver;
}
