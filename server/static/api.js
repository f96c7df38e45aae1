// Calls of Weft's API with the browser's session, and hooks that pages use them with.
import { signal, useCallback, useEffect, useRef, useState } from "./lib.js";

/** What the API refused, or why there was no answer. */
export class ApiError extends Error {
  constructor(status, fields) {
    super(fields.message);
    this.status = status;
    this.code = fields.code;
    this.param = fields.param ?? null;
    /** @type {{code: string, message: string, param: string|null, hint: string}[]} */
    this.findings = fields.findings ?? [];
    this.requestId = fields.requestId ?? null;
  }
}

/** Counts the answers that say that the session has ended. */
export const sessionLost = signal(0);

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
 * Call the API. A body that is no form is sent as JSON.
 * @returns {Promise<Response>} An answer that is no error.
 * @throws {ApiError}
 */
export async function send(method, path, { params, body, signal, headers } = {}) {
  const isJson = body !== undefined && !(body instanceof FormData);
  let response;
  try {
    response = await fetch(address(path, params), {
      method,
      signal,
      headers: { ...(isJson ? { "content-type": "application/json" } : {}), ...headers },
      body: isJson ? JSON.stringify(body) : body,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, {
      code: "unreachable",
      message: "The server does not answer. Is it still running? This page goes on when it is back.",
    });
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
  let fields;
  try {
    fields = (await response.json()).error;
  } catch {
    fields = null;
  }
  fields ??= { code: "http", message: `The server answered ${response.status}.` };
  if (response.status === 401) sessionLost.value += 1;
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
  const shown = useRef(key);
  shown.current = key;
  const isAsking = useRef(false);
  useEffect(() => {
    if (key === null) return undefined;
    const aborter = new AbortController();
    isAsking.current = true;
    setState((before) => ({ ...before, isLoading: true }));
    const answer = all ? callAll(path, params, aborter.signal) : call("GET", path, { params, signal: aborter.signal });
    answer.finally(() => aborter.signal.aborted || (isAsking.current = false)).then(
      (data) => shown.current === key && setState({ key, data, about, at: Date.now(), error: null, isLoading: false }),
      (error) => {
        if (error.name === "AbortError" || shown.current !== key) return;
        if (!(error instanceof ApiError)) throw error;
        setState((before) => ({ ...(before.key === key ? before : { key, data: undefined, at: null }), error, isLoading: false }));
      },
    );
    return () => aborter.abort();
  }, [key, asked, all]);
  useEffect(() => {
    if (!everyS || key === null) return undefined;
    // An answer may take longer than the time between two questions.
    const timer = setInterval(() => document.hidden || isAsking.current || reload(), everyS * 1000);
    return () => clearInterval(timer);
  }, [everyS, key]);
  const { data, about: answered, at, error } = state;
  const isStale = state.key !== key;
  return { data, about: answered, at, error, isLoading: state.isLoading || isStale, isStale, reload };
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
 * The data of a stream of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).
 * @param {Response} response
 * @returns {AsyncGenerator<{event: string, data: string}>}
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
        const fields = block.split("\n").map((line) => line.match(/^(\w+): ?(.*)$/)).filter(Boolean);
        const data = fields.filter(([, name]) => name === "data").map(([, , rest]) => rest);
        const event = fields.find(([, name]) => name === "event");
        if (data.length) yield { event: event ? event[2] : "message", data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
