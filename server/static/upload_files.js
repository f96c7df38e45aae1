// Finds the adapter among chosen or dropped files, and what is wrong with them before they are sent.

/** @typedef {{path: string, file: File}} Found `path` with its folders, as far as the browser tells. */

const CONFIG = /^adapter_config( ?\(\d+\))?\.json$/;
const WEIGHTS = /^(adapter_model|adapters)( ?\(\d+\))?\.safetensors$/;
const MOST_FILES = 2000;
const HINTS = [
  { like: /\.(bin|pt|pth|ckpt|pkl)$/i, says: "is a pickle, which can run code when it is read; Weft takes safetensors only",
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
  const chosen = [configs, weights].filter((files) => files.length === 1).map(([one]) => one);
  const problems = [...oneOf(configs, "adapter_config.json"), ...(weights.length === 0 ? unread(here) : []),
    ...oneOf(weights, "adapter_model.safetensors", weights.length === 0 && unread(here).length > 0), ...chosen.flatMap(empty)];
  return {
    config: configs.length === 1 ? configs[0].file : null,
    weights: weights.length === 1 ? weights[0].file : null,
    name: suggestedName(nameOf(folder)),
    left: found.filter((one) => !chosen.includes(one)).map(({ path }) => path),
    problems,
  };
}

/** The folder nearest to the top that holds a config; of nothing that does, the one nearest to the top. */
function adapterFolder(found) {
  const depth = ({ path }) => path.split("/").length;
  const ordered = [...found].sort((a, b) => depth(a) - depth(b));
  const first = ordered.find(({ path }) => CONFIG.test(nameOf(path))) ?? ordered[0];
  return first ? folderOf(first.path) : "";
}

function oneOf(files, usual, isTold = false) {
  if (files.length === 1 || isTold) return [];
  if (!files.length) return [{ message: `${usual} is missing.`, hint: "Both files are needed, as PEFT's save_pretrained or mlx-lm writes them." }];
  const names = files.map(({ path }) => nameOf(path)).join(", ");
  return [{ message: `There are ${files.length} files that could be ${usual}: ${names}.`, hint: "Choose the one that is meant." }];
}

const empty = ({ path, file }) => (file.size ? [] : [{ message: `${nameOf(path)} is empty.`, hint: "Save the adapter again." }]);

function unread(files) {
  for (const { like, says, hint } of HINTS) {
    const one = files.find(({ path }) => like.test(path));
    if (one) return [{ message: `${nameOf(one.path)} ${says}.`, hint }];
  }
  return [];
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
export function droppedFiles(transfer) {
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
