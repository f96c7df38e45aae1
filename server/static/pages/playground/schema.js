// JSON that the user wrote, and whether an answer fits a JSON schema.

/** What the text of a field says, and what is wrong with it. @returns {{value?: unknown, error?: string}} Neither if it is empty. */
export function parsed(text, isRight, wanted) {
  if (!text.trim()) return {};
  try {
    const value = JSON.parse(text);
    return isRight(value) ? { value } : { error: wanted };
  } catch (error) {
    return { error: `Not valid JSON: ${error.message}` };
  }
}

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isEqual = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : Number.isInteger(value) ? "integer" : typeof value);
const isOfType = (value, type) => [type].flat().some((one) => one === typeOf(value) || (one === "number" && typeof value === "number"));

/** The first thing in which a value does not fit, or null. Types, enum, const, properties and items are looked at; the server holds the model to the whole schema. */
export function misfit(value, schema, at = "The answer") {
  if (!isObject(schema)) return null;
  if (schema.type && !isOfType(value, schema.type)) return `${at} is not of type ${[schema.type].flat().join(" or ")}.`;
  if ((schema.enum && !schema.enum.some((one) => isEqual(one, value))) || ("const" in schema && !isEqual(schema.const, value))) return `${at} has a value that the schema does not list.`;
  if (Array.isArray(value)) return firstOf(value.map((one, index) => misfit(one, schema.items, `${at}[${index}]`)));
  if (!isObject(value)) return null;
  const known = schema.properties ?? {};
  const missing = schema.required?.find((name) => !(name in value));
  const unknown = schema.additionalProperties === false && Object.keys(value).find((name) => !Object.hasOwn(known, name));
  if (missing || unknown) return `${at} ${missing ? "lacks" : "has an unknown"} ${JSON.stringify(missing ?? unknown)}.`;
  return firstOf(Object.keys(value).map((name) => misfit(value[name], known[name], `${at}.${name}`)));
}

const firstOf = (faults) => faults.find(Boolean) ?? null;
