// Which colour an adapter has on this page: the same for as long as the page is open, and most often after it as well.
/** The first of them are told apart at a glance; the others come when those are taken. */
const COLOURS = 14;
const FIRST_COLOURS = 8;

/** @type {Map<string, number>} */
const given = new Map();

/** Give colours to adapters that have none yet; two that are shown at once differ, as long as there are colours. */
export function giveColours(digests) {
  const taken = new Set(digests.filter((digest) => given.has(digest)).map((digest) => given.get(digest)));
  for (const digest of digests.filter((one) => !given.has(one)).sort()) {
    const wanted = parseInt(digest.slice(-6), 16) % FIRST_COLOURS;
    const order = Array.from({ length: COLOURS }, (_, at) => (at < FIRST_COLOURS ? (wanted + at) % FIRST_COLOURS : at));
    const colour = order.find((one) => !taken.has(one)) ?? wanted;
    given.set(digest, colour);
    taken.add(colour);
  }
}

/** The class that gives an adapter's weights their colour. */
export const adapterColour = (digest) => (given.has(digest) ? `a${given.get(digest)}` : "a-any");

/** What an adapter is called: its first name and how many more it has, or its digest. */
export function nameOf(digest, names) {
  if (!names?.length) return digest ? digest.slice("sha256:".length, "sha256:".length + 12) : "an adapter";
  return names.length > 1 ? `${names[0]} and ${names.length - 1} more` : names[0];
}
