// The stream of the engine's snapshots: the last one, and the state of the connection.
import { useEffect, useState } from "../../lib.js";
import { ApiError, address, call } from "../../api.js";

/** The browser does not reconnect after an answer with an error; this page then connects again after so long. */
const AGAIN_MS = 5000;
/** How long back the pages by kind are kept. */
export const KEPT_MS = 120_000;
/** How long a tenant without requests stays in the table, in ms; without this its row would come and go. */
const LATELY_MS = 10_000;

/**
 * @typedef {{newest: object|null, held: object|null, isPaused: boolean, state: "connecting"|"live"|"broken",
 *   problem: ApiError|null, restartedAt: number|null, heardAt: number|null,
 *   moments: {at: number, pages: Record<string, number>}[]}} Feed
 *   `held` is shown while the page is paused; `problem` is why the engine or the server tells nothing; `restartedAt` is when
 *   another life of the engine was first seen, `heardAt` when the last snapshot came. `moments`: oldest first; the first may
 *   be older than `KEPT_MS`, because it held until the second.
 */

const NOTHING = { newest: null, held: null, isPaused: false, state: "connecting", problem: null, restartedAt: null, heardAt: null, moments: [] };

/** The feed of a server, or of any, for as long as a component is shown, and what changes it. @returns {[Feed, (fields: object) => void]} */
export function useFeed(server) {
  const [feed, setFeed] = useState(NOTHING);
  const change = (fields) => setFeed((before) => ({ ...before, ...fields }));
  useEffect(() => {
    setFeed((before) => (before.newest?.server === server ? before : NOTHING));
    return listen(server, setFeed, change);
  }, [server]);
  return [feed, change];
}

/** Change the feed as the stream tells, until the returned function is called. */
function listen(server, update, change) {
  /** When each tenant last had requests in the engine. @type {Map<string, number>} */
  const seenAt = new Map();
  let source = null;
  let timer = null;
  let fading = null;

  function open() {
    source = new EventSource(address("/v1/engine/events", { server }));
    source.onmessage = (event) => take(JSON.parse(event.data));
    source.addEventListener("engine_error", (event) => change({ state: "live", problem: new ApiError(503, JSON.parse(event.data).error) }));
    source.onerror = () => {
      change({ state: "broken" });
      if (source.readyState === EventSource.CLOSED) reconnect();
    };
  }

  function take(snapshot) {
    const at = Date.now();
    for (const name of Object.keys(snapshot.tenants)) seenAt.set(name, at);
    for (const [name, seen] of seenAt) if (seen < at - LATELY_MS) seenAt.delete(name);
    clearTimeout(fading);
    fading = setTimeout(() => change({ newest: { ...snapshot, lately: [] } }), LATELY_MS);
    update((before) => {
      const moments = [...before.moments, { at, pages: snapshot.pages }];
      const kept = moments.filter((_, index) => index === moments.length - 1 || moments[index + 1].at >= at - KEPT_MS);
      const isAnother = before.newest !== null && before.newest.boot_id !== snapshot.boot_id;
      const newest = { ...snapshot, lately: [...seenAt.keys()] };
      return { ...before, newest, state: "live", problem: null, restartedAt: isAnother ? at : before.restartedAt, heardAt: at, moments: kept };
    });
  }

  /** Find out why the server refuses; where the session has ended, the call itself leads to the sign-in. */
  function reconnect() {
    close();
    call("GET", "/v1/me").then(() => change({ problem: null }), (problem) => change({ problem }));
    timer = setTimeout(open, AGAIN_MS);
  }

  function close() {
    clearTimeout(timer);
    clearTimeout(fading);
    source.close();
  }

  open();
  return close;
}
