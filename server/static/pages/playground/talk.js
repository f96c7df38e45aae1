// One column's conversation with a model: asks, takes the answer as it comes, and can be stopped.
import { signal } from "../../lib.js";
import { ApiError, eventsOf, send } from "../../api.js";

const SHOW_MS = 30;
/** What comes within less tells nothing of a pace. */
const PACE_MS = 20;

/**
 * @typedef {{asked: object[], request: Request, text: string, reasoning: string, calls: Call[], state: "waiting"|"coming"|"done"|"stopped"|"failed",
 *   adapter?: string|null, residency?: string|null, ttftS?: number, pace?: number, usage?: object,
 *   finish?: string, error?: ApiError}} Exchange
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{path: string, tenant: string|null, body: object}} Request
 */

export function makeTalk() {
  /** @type {import("../../lib.js").Signal<Exchange[]>} */
  const exchanges = signal([]);
  const isBusy = signal(false);
  let aborter = null;
  const change = (fields) => (exchanges.value = [...exchanges.value.slice(0, -1), { ...exchanges.value.at(-1), ...fields }]);

  /** Send a request that ends with the messages `asked`: a prompt, or the results of calls. */
  async function ask(asked, request) {
    if (isBusy.value) return;
    aborter = new AbortController();
    const own = aborter;
    isBusy.value = true;
    exchanges.value = [...exchanges.value, { asked, request, text: "", reasoning: "", calls: [], state: "waiting" }];
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

/** The calls with one more piece of one of them; a call's first piece has its id and name. */
function withPiece(calls, { index, id, function: piece }) {
  const before = calls[index] ?? { id, name: piece.name, arguments: "" };
  return calls.toSpliced(index, 1, { ...before, arguments: before.arguments + (piece.arguments ?? "") });
}

/** The messages of a conversation so far, without exchanges that failed and calls that nobody answered. `asked` comes next. */
export function messagesOf(exchanges, asked) {
  const kept = exchanges.filter((one) => (one.calls.length ? one.state === "done" : one.text && (one.state === "done" || one.state === "stopped")));
  const next = (at) => (kept[at + 1]?.asked ?? asked)[0];
  return kept.filter((one, at) => !one.calls.length || next(at).role === "tool").flatMap((one) => [...one.asked, answerOf(one)]);
}

const answerOf = ({ text, calls }) =>
  calls.length
    ? { role: "assistant", content: text || null, tool_calls: calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } })) }
    : { role: "assistant", content: text };

/** Ask, and tell what comes a few times a second. */
async function take({ path, tenant, body }, signal, tell) {
  const started = performance.now();
  // Usage comes with every chunk, because a stopped answer needs it too.
  const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await send("POST", path, { params: { tenant }, body: { ...body, ...stream }, signal });
  const fields = { state: "coming", adapter: response.headers.get("x-manylora-adapter"), residency: response.headers.get("x-manylora-adapter-state"), text: "", reasoning: "", calls: [] };
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
      fields.reasoning += choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      fields.calls = (choice?.delta?.tool_calls ?? []).reduce(withPiece, fields.calls);
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
