// Finds the adapter among chosen or dropped files, and what is wrong with them before they are sent.
import { useState } from "./lib.js";
import { useWindowEvents } from "./ui.js";

/** @typedef {{path: string, file: File}} Found `path` with its folders, as far as the browser tells. */

const CONFIG = /^adapter_config( ?\(\d+\))?\.json$/;
const WEIGHTS = /^(adapter_model|adapters)( ?\(\d+\))?\.safetensors$/;
const MOST_FILES = 2000;
const HINTS = [
  { like: /\.(bin|pt|pth|ckpt|pkl)$/i, says: "is a pickle, which can run code when it is read; Manylora takes safetensors only",
    hint: 'Save the adapter again: model.save_pretrained("my-adapter", safe_serialization=True)' },
  { like: /\.(zip|tar|tgz|gz|7z|rar)$/i, says: "is an archive", hint: "Unpack it, and give the folder or its two files." },
  { like: /\.gguf$/i, says: "is in llama.cpp's format", hint: "Give the safetensors file from which it was made." },
];

const nameOf = (path) => path.slice(path.lastIndexOf("/") + 1);
const folderOf = (path) => path.slice(0, Math.max(0, path.lastIndexOf("/")));

/**
 * @param {Found[]} found
 * @returns {{config: File|null, weights: File|null, name: string, left: string[], problems: {message: string, hint: string}[]}}
 *   `name` is what the folder suggests; `left` are files that are not sent.
 */
export function adapterAmong(found) {
  const folder = adapterFolder(found);
  const here = found.filter(({ path }) => folderOf(path) === folder);
  const configs = here.filter(({ path }) => CONFIG.test(nameOf(path)));
  const named = here.filter(({ path }) => WEIGHTS.test(nameOf(path)));
  const weights = named.length ? named : here.filter(({ path }) => path.endsWith(".safetensors"));
  const [config, weight] = [configs, weights].map((files) => (files.length === 1 ? files[0] : null));
  return {
    config: config && config.file,
    weights: weight && weight.file,
    name: suggestedName(nameOf(folder)),
    left: found.filter((one) => one !== config && one !== weight).map(({ path }) => path),
    problems: [problemOf(configs, "adapter_config.json"), problemOf(weights, "adapter_model.safetensors", here)].filter(Boolean),
  };
}

/** The folder nearest to the top that holds a config; of nothing that does, the one nearest to the top. */
function adapterFolder(found) {
  const depth = ({ path }) => path.split("/").length;
  const ordered = [...found].sort((a, b) => depth(a) - depth(b));
  const first = ordered.find(({ path }) => CONFIG.test(nameOf(path))) ?? ordered[0];
  return first ? folderOf(first.path) : "";
}

/** Why these are not one file that can be sent as `usual`; `others` may be what it was taken for. */
function problemOf(files, usual, others = []) {
  const names = files.map(({ path }) => nameOf(path)).join(", ");
  if (files.length > 1) return { message: `There are ${files.length} files that could be ${usual}: ${names}.`, hint: "Choose the one that is meant." };
  if (files.length === 1) return files[0].file.size ? null : { message: `${names} is empty.`, hint: "Save the adapter again." };
  for (const { like, says, hint } of HINTS) {
    const one = others.find(({ path }) => like.test(path));
    if (one) return { message: `${nameOf(one.path)} ${says}.`, hint };
  }
  return { message: `${usual} is missing.`, hint: "Both files are needed, as PEFT's save_pretrained or mlx-lm writes them." };
}

/** "My Adapter" -> my-adapter; "" where nothing is left. */
const suggestedName = (text) =>
  text.toLowerCase().replace(/[^a-z0-9._-]+/g, "-").replace(/\.{2,}/g, ".").slice(0, 63).replace(/^[^a-z0-9]+|[^a-z0-9]+$/g, "");

/** What `isName` asks for, in words. */
export const NAME_RULE = "Lower-case letters, digits, dots, underscores and hyphens, at most 63; a letter or digit first and last.";

export const isName = (text) => /^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$/.test(text) && !text.includes("..");

/** What an input has chosen. @returns {Found[]} */
export const chosenFiles = (input) => [...input.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));

/** What was dropped, with what lies in dropped folders. @param {DataTransfer} transfer @returns {Promise<Found[]>} */
function droppedFiles(transfer) {
  // The items are gone as soon as the event is over, so all are taken before the first wait.
  const taken = [...transfer.items].filter((item) => item.kind === "file").map((item) => ({ entry: item.webkitGetAsEntry?.(), file: item.getAsFile() }));
  const found = [];
  return Promise.all(taken.map(({ entry, file }) => (entry?.isDirectory ? walk(entry, found) : file && found.push({ path: file.name, file })))).then(() => found);
}

async function walk(folder, found) {
  const reader = folder.createReader();
  for (;;) {
    const entries = await new Promise((done, failed) => reader.readEntries(done, failed)); // some at a time, until there are none
    if (!entries.length) return;
    for (const entry of entries) {
      if (found.length >= MOST_FILES) return;
      if (entry.isDirectory) await walk(entry, found);
      else found.push({ path: entry.fullPath.replace(/^\//, ""), file: await new Promise((done, failed) => entry.file(done, failed)) });
    }
  }
}

/** Call `act` with the files dropped anywhere on the page, while `isOn`; says whether files hang over it. */
export function useDrops(act, isOn) {
  const [isOver, setOver] = useState(false);
  const taken = (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    setOver(event.type === "dragover");
    if (event.type === "drop") droppedFiles(event.dataTransfer).then(act);
  };
  const leave = (event) => event.relatedTarget === null && setOver(false);
  useWindowEvents({ dragover: taken, dragleave: leave, drop: taken }, isOn);
  return isOver;
}
