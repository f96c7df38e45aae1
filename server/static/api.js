// Calls of Manylora's API with the browser's session, and hooks that pages use them with.
import { signal, useCallback, useEffect, useState } from "./lib.js";

/** What the API refused, or why there was no answer. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 where nothing answered.
   * @param {{message: string, code: string, findings?: {code: string, message: string, param: string|null, hint: string}[],
   *   requestId?: string|null}} fields
   */
  constructor(status, { message, code, findings = [], requestId = null }) {
    super(message);
    Object.assign(this, { status, code, findings, requestId });
  }
}

/** The answer of GET /v1/me; null while nobody is signed in, undefined until that is known. */
export const me = signal(undefined);

/**
 * @param {string} path
 * @param {Record<string, unknown>} [params] Empty values are left out; a list repeats its name.
 */
export function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null) query.append(name, String(one));
    }
  }
  return query.size ? `${path}?${query}` : path;
}

/**
 * Call the API; a body is sent as JSON.
 * @returns {Promise<Response>} An answer that is no error.
 * @throws {ApiError}
 */
export async function send(method, path, { params, body, signal, headers } = {}) {
  let response;
  try {
    response = await fetch(address(path, params), {
      method,
      signal,
      headers: { ...(body && { "content-type": "application/json" }), ...headers },
      body: JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { code: "unreachable", message: "The server does not answer. Is it still running? This page goes on when it is back." });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Call the API for JSON; null where there is no content. */
export async function call(method, path, options) {
  const response = await send(method, path, options);
  return response.status === 204 ? null : response.json();
}

/** All rows of a list, page by page, with what else the first page says. */
export async function callAll(path, params, signal) {
  const first = await call("GET", path, { params, signal });
  for (let next = first.next; next; ) {
    const page = await call("GET", path, { params: { ...params, after: next }, signal });
    first.data.push(...page.data);
    next = page.next;
  }
  return { ...first, next: null };
}

/** @param {Response} response */
export async function errorOf(response) {
  const requestId = response.headers.get("x-request-id");
  const told = await response.json().catch(() => null);
  const fields = told?.error ?? { code: "http", message: `The server answered ${response.status}.` };
  if (response.status === 401 && me.value) me.value = null;
  return new ApiError(response.status, { ...fields, requestId });
}

/**
 * Read from the API while a component is shown; earlier data stays until newer arrives. When the question
 * changes and fails, the data is dropped, because it answers another question.
 * @template T
 * @param {string|null} path Null asks nothing.
 * @param {Record<string, unknown>} [params]
 * @param {{all?: boolean, everyS?: number, about?: unknown}} [options] All pages of a list; refreshed every so many
 *   seconds; any value that belongs to the question and is returned with its answer.
 * @returns {{data: T|undefined, about: unknown, at: number|null, error: ApiError|null, isLoading: boolean,
 *   isStale: boolean, reload: () => void}} `at` is when the data came, `isStale` while it answers an earlier question.
 */
export function useApi(path, params = {}, { all = false, everyS, about } = {}) {
  const key = path === null ? null : address(path, params);
  const [state, setState] = useState({ key: null, data: undefined, at: null, error: null, isLoading: true });
  const [asked, setAsked] = useState(0);
  const reload = useCallback(() => setAsked((times) => times + 1), []);
  useEffect(() => {
    if (key === null) return undefined;
    const aborter = new AbortController();
    let timer = null;
    const waitToAsk = () => everyS && (timer = setTimeout(() => (document.hidden ? waitToAsk() : reload()), everyS * 1000));
    const settle = (change) => {
      if (aborter.signal.aborted) return;
      setState((before) => ({ ...change(before), isLoading: false }));
      waitToAsk();
    };
    setState((before) => ({ ...before, isLoading: true }));
    const answer = all ? callAll(path, params, aborter.signal) : call("GET", path, { params, signal: aborter.signal });
    answer.then(
      (data) => settle(() => ({ key, data, about, at: Date.now(), error: null })),
      (error) => {
        settle((before) => ({ ...(before.key === key ? before : { key, data: undefined, at: null }), error }));
        if (!(error instanceof ApiError) && error.name !== "AbortError") throw error;
      },
    );
    return () => {
      aborter.abort();
      clearTimeout(timer);
    };
  }, [key, asked, all, everyS]);
  const isStale = state.key !== key;
  return { ...state, isLoading: state.isLoading || isStale, isStale, reload };
}

/** Changes that may be refused: `send` makes one and returns whether it worked; `error` is the last refusal. */
export function useSending(before = null) {
  const [error, setError] = useState(before);
  const send = async (change) => {
    setError(null);
    try {
      await change();
    } catch (problem) {
      if (!(problem instanceof ApiError)) throw problem;
      setError(problem);
      return false;
    }
    return true;
  };
  return { error, send };
}

/**
 * The data of each event of a stream (https://html.spec.whatwg.org/multipage/server-sent-events.html).
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value.replaceAll("\r\n", "\n");
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.replace(/^data: ?/, ""));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
