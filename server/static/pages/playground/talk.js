// One column's conversation with a model: asks, takes the answer as it comes, and can be stopped.
import { signal } from "../../lib.js";
import { ApiError, eventsOf, send } from "../../api.js";

const SHOW_MS = 30;
/** What comes within less tells nothing of a pace. */
const PACE_MS = 20;

/**
 * @typedef {{prompt: string, request: Request, text: string, state: "waiting"|"coming"|"done"|"stopped"|"failed",
 *   adapter?: string|null, residency?: string|null, ttftS?: number, pace?: number, usage?: object,
 *   finish?: string, error?: ApiError}} Exchange
 * @typedef {{path: string, tenant: string|null, body: object}} Request
 */

export function makeTalk() {
  /** @type {import("../../lib.js").Signal<Exchange[]>} */
  const exchanges = signal([]);
  const isBusy = signal(false);
  let aborter = null;
  const change = (fields) => (exchanges.value = [...exchanges.value.slice(0, -1), { ...exchanges.value.at(-1), ...fields }]);

  async function ask(prompt, request) {
    if (isBusy.value) return;
    aborter = new AbortController();
    const own = aborter;
    isBusy.value = true;
    exchanges.value = [...exchanges.value, { prompt, request, text: "", state: "waiting" }];
    try {
      await take(request, own.signal, (fields) => own === aborter && change(fields));
    } catch (error) {
      if (own !== aborter) return; // the conversation was cleared meanwhile
      const said = own.signal.aborted ? null : error instanceof ApiError ? error : broken();
      change(said ? { state: "failed", error: said } : { state: "stopped" });
    } finally {
      if (own === aborter) isBusy.value = false;
    }
  }

  const stop = () => aborter?.abort();

  function clear() {
    stop();
    aborter = null;
    isBusy.value = false;
    exchanges.value = [];
  }

  return { exchanges, isBusy, ask, stop, clear };
}

const broken = () => new ApiError(0, { code: "stream_broken", message: "The connection broke before the answer ended. The part that arrived is shown; send the request again." });

/** Ask, and tell what comes a few times a second. */
async function take({ path, tenant, body }, signal, tell) {
  const started = performance.now();
  // Usage comes with every chunk, because a stopped answer needs it too.
  const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await send("POST", path, { params: { tenant }, body: { ...body, ...stream }, signal });
  const fields = { state: "coming", adapter: response.headers.get("x-weft-adapter"), residency: response.headers.get("x-weft-adapter-state"), text: "" };
  tell({ ...fields });
  let first = null;
  let firstTokens = 0;
  let shown = 0;
  try {
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") {
        fields.state = "done";
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, { ...chunk.error, requestId: response.headers.get("x-request-id") });
      const [choice] = chunk.choices;
      fields.text += choice?.delta?.content ?? choice?.text ?? "";
      fields.finish = choice?.finish_reason ?? fields.finish;
      fields.usage = chunk.usage ?? fields.usage;
      const now = performance.now();
      const tokens = fields.usage?.completion_tokens ?? 0;
      if (first === null && tokens > 0) {
        [first, firstTokens] = [now, tokens];
        fields.ttftS = (now - started) / 1000;
      } else if (first !== null && tokens > firstTokens && choice && now - first > PACE_MS) {
        fields.pace = ((tokens - firstTokens) * 1000) / (now - first);
      }
      if (now - shown > SHOW_MS) {
        shown = now;
        tell({ ...fields });
      }
    }
  } finally {
    tell({ ...fields });
  }
  throw broken();
}
