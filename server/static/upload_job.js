// The running upload. It goes on while its window is closed and other pages are shown.
import { signal } from "./lib.js";
import { ApiError, address, errorOf } from "./api.js";

/**
 * @typedef {{name: string, tenant: string|null, description: string, activate: boolean, config: File, weights: File, key: string}} Draft
 *   `key` is the Idempotency-Key: the same for the same bytes, which can then be sent again safely.
 * @typedef {{draft: Draft, phase: "sending"|"checking"|"done"|"refused"|"lost", sent: number, total: number, bytesPerS: number|null,
 *   error: ApiError|null, adapter: object|null, isNew: boolean, cancel: () => void}} Job
 */

/** @type {import("./vendor/signals.js").Signal<Job|null>} */
export const job = signal(null);

export const isUnderWay = () => job.value?.phase === "sending" || job.value?.phase === "checking";

const SPEED_MS = 3000;
const LOST = {
  code: "unreachable",
  message:
    "The connection was lost before the server answered, or a file changed since it was chosen. " +
    "Send it again: the same bytes may be sent as often as needed, and become one version.",
};

/** A new Idempotency-Key. Pages without TLS have no randomUUID. */
export const newKey = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Send an adapter; `job` tells how it goes. @param {Draft} draft */
export function begin(draft) {
  const request = new XMLHttpRequest(); // fetch tells nothing of what was sent
  const change = (fields) => (job.value = { ...job.value, ...fields });
  const speed = meter();
  job.value = { draft, phase: "sending", sent: 0, total: draft.config.size + draft.weights.size, bytesPerS: null, error: null,
    adapter: null, isNew: false, cancel: () => request.abort() };
  request.upload.onprogress = (event) => change({ sent: event.loaded, total: event.total, bytesPerS: speed(event.loaded) });
  request.upload.onload = (event) => change({ phase: "checking", sent: event.loaded, total: event.loaded });
  request.onerror = () => change({ phase: "lost", error: new ApiError(0, LOST) });
  request.onabort = () => (job.value = null);
  request.onload = async () => {
    if (request.status === 200 || request.status === 201) {
      change({ phase: "done", adapter: JSON.parse(request.responseText), isNew: request.status === 201 });
      return;
    }
    const headers = { "x-request-id": request.getResponseHeader("x-request-id") ?? "" };
    change({ phase: "refused", error: await errorOf(new Response(request.responseText, { status: request.status, headers })) });
  };
  request.open("POST", address("/v1/adapters", { tenant: draft.tenant }));
  request.setRequestHeader("idempotency-key", draft.key);
  request.send(formOf(draft));
}

function formOf({ name, description, activate, config, weights }) {
  const form = new FormData();
  form.append("name", name);
  if (description) form.append("description", description);
  form.append("activate", String(activate));
  form.append("config", config, "adapter_config.json");
  form.append("weights", weights, "adapter_model.safetensors");
  return form;
}

/** Bytes a second over the last seconds. */
function meter() {
  const marks = [];
  return (sent) => {
    const now = performance.now();
    marks.push({ now, sent });
    while (marks.length > 2 && now - marks[0].now > SPEED_MS) marks.shift();
    const passed = now - marks[0].now;
    return passed > 200 ? ((sent - marks[0].sent) / passed) * 1000 : null;
  };
}

addEventListener("beforeunload", (event) => isUnderWay() && event.preventDefault());
