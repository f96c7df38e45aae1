// The stream of the engine's snapshots: the last one, and the state of the connection.
import { batch, signal, useEffect, useState } from "../../lib.js";
import { ApiError, call } from "../../api.js";

const EVENTS = "/v1/engine/events";
/** Where the browser gives up, which it does when the server answers with an error, this page comes again by itself. */
const AGAIN_MS = 5000;
/** How long back the pages by kind are kept. */
export const KEPT_MS = 120_000;
/** How long a tenant without requests stays in the table, in ms; without this its row would come and go. */
const LATELY_MS = 10_000;

/** @typedef {{at: number, pages: Record<string, number>}} Moment */

/** A feed for as long as a component is shown. */
export function useFeed() {
  const [feed] = useState(makeFeed);
  useEffect(() => {
    feed.open();
    return feed.close;
  }, []);
  return feed;
}

function makeFeed() {
  const feed = {
    /** What is shown; stands still while paused. */
    snapshot: signal(null),
    /** "connecting", "live" or "broken". */
    state: signal("connecting"),
    /** Why the engine or the server tells nothing. @type {import("../../lib.js").Signal<ApiError|null>} */
    problem: signal(null),
    isPaused: signal(false),
    /** When another life of the engine was first seen. */
    restartedAt: signal(null),
    /** When the last snapshot came. */
    heardAt: signal(null),
    /** @type {Moment[]} Oldest first; the first may be older than what is kept, since it held until the second. */
    moments: [],
    open,
    close,
    pause,
  };
  let source = null;
  let timer = null;
  let newest = null;
  let fading = null;
  /** When each tenant last had requests in the engine. @type {Map<string, number>} */
  const seenAt = new Map();

  function open() {
    source = new EventSource(EVENTS);
    source.onmessage = (event) => take(JSON.parse(event.data));
    source.addEventListener("engine_error", (event) => {
      const fields = JSON.parse(event.data).error;
      batch(() => {
        feed.state.value = "live";
        feed.problem.value = new ApiError(503, fields);
      });
    });
    source.onerror = () => {
      feed.state.value = "broken";
      if (source.readyState === EventSource.CLOSED) comeAgain();
    };
  }

  function take(snapshot) {
    const at = Date.now();
    const { moments } = feed;
    moments.push({ at, pages: snapshot.pages });
    while (moments.length > 1 && moments[1].at < at - KEPT_MS) moments.shift();
    for (const name of Object.keys(snapshot.tenants)) seenAt.set(name, at);
    for (const [name, seen] of seenAt) if (seen < at - LATELY_MS) seenAt.delete(name);
    clearTimeout(fading);
    fading = setTimeout(() => show({ ...snapshot, lately: [] }), LATELY_MS);
    batch(() => {
      if (newest && newest.boot_id !== snapshot.boot_id) feed.restartedAt.value = at;
      feed.state.value = "live";
      feed.problem.value = null;
      feed.heardAt.value = at;
      show({ ...snapshot, lately: [...seenAt.keys()] });
    });
  }

  function show(snapshot) {
    newest = snapshot;
    if (!feed.isPaused.value) feed.snapshot.value = snapshot;
  }

  /** Find out why the server refuses; where the session has ended, the call itself leads to the sign-in. */
  function comeAgain() {
    close();
    call("GET", "/v1/me").then(
      () => (feed.problem.value = null),
      (error) => {
        if (error.status === undefined) throw error;
        feed.problem.value = error;
      },
    );
    timer = setTimeout(open, AGAIN_MS);
  }

  function close() {
    clearTimeout(timer);
    clearTimeout(fading);
    source?.close();
  }

  function pause() {
    batch(() => {
      feed.isPaused.value = !feed.isPaused.value;
      if (!feed.isPaused.value && newest) feed.snapshot.value = newest;
    });
  }

  return feed;
}
