// What the programs for node share; see feature.py.
export const env = process.env;
export const V1 = `${env.MANYLORA_URL}/v1`;
export const { MANYLORA_KEY: KEY, MANYLORA_BASE: BASE, MANYLORA_ADAPTER: ADAPTER, MANYLORA_QUESTION: QUESTION, MANYLORA_ANSWER: ANSWER } = env;
export const CARD_QUESTION = "Tell me about the scarf.";
export const AGENT_QUESTION = "Where is the rug and how much is it?";
export const RESULTS = { where_is: "shelf 8", price_of: "44" };

/** Throws where a value is not what was expected. */
export function equal(got, expected) {
  if (JSON.stringify(got) !== JSON.stringify(expected)) {
    throw new Error(`expected ${JSON.stringify(expected)}, got ${JSON.stringify(got)}`);
  }
}

/** Whether this is what the base knows of the scarf. */
export function isScarf(card) {
  return card?.item === "scarf" && card.material === "silk" && card.price === 20 && card.in_stock === true;
}

/** Whether an answer tells both results. */
export function hasBoth(text) {
  return Object.values(RESULTS).every((result) => text?.includes(result));
}

/** Reports a feature as ok where the function ends without an error. */
export async function feature(name, run) {
  let note = "";
  try {
    await run();
  } catch (error) {
    note = `${error?.name}: ${error?.message} ${error?.responseBody ?? ""}`.slice(0, 600) || "failed";
  }
  console.log(JSON.stringify({ feature: name, ok: note === "", note }));
}
