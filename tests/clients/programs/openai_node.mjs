// openai for node: chat, streams, structured output, tools, Responses.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ADAPTER, AGENT_QUESTION, ANSWER, BASE, CARD_QUESTION, KEY, QUESTION, RESULTS, V1 } from "./feature.mjs";
import { equal, feature, hasBoth, isScarf } from "./feature.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const asked = { model: ADAPTER, messages: user(QUESTION), temperature: 0 };
const Card = z.object({ item: z.string(), material: z.string(), price: z.int(), in_stock: z.boolean() });
const parameters = { type: "object", properties: { item: { type: "string" } }, required: ["item"] };
const tools = Object.keys(RESULTS).map((name) => ({
  type: "function",
  function: { name, parameters, description: "Asks the shop.", parse: JSON.parse, function: () => RESULTS[name] },
}));

await feature("chat", async () => {
  const answer = await client.chat.completions.create(asked);
  equal(answer.choices[0].message.content, ANSWER);
});

await feature("stream", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  equal(text, ANSWER);
});

await feature("completions", async () => {
  const made = await client.completions.create({ model: BASE, prompt: "The shop", max_tokens: 4 });
  equal(made.choices.length, 1);
});

await feature("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  equal(names.includes(ADAPTER), true);
});

await feature("`parse`", async () => {
  const response_format = zodResponseFormat(Card, "card");
  const request = { model: BASE, messages: user(CARD_QUESTION), temperature: 0, response_format };
  equal(isScarf((await client.chat.completions.parse(request)).choices[0].message.parsed), true);
});

await feature("runTools", async () => {
  const request = { model: BASE, messages: user(AGENT_QUESTION), temperature: 0, tools };
  equal(hasBoth(await client.chat.completions.runTools(request).finalContent()), true);
});

await feature("runTools streamed", async () => {
  const request = { model: BASE, messages: user(AGENT_QUESTION), temperature: 0, tools, stream: true };
  equal(hasBoth(await client.chat.completions.runTools(request).finalContent()), true);
});

await feature("responses", async () => {
  equal((await client.responses.create({ model: ADAPTER, input: QUESTION, temperature: 0 })).output_text, ANSWER);
});

await feature("responses streamed", async () => {
  const stream = client.responses.stream({ model: ADAPTER, input: QUESTION, temperature: 0 });
  equal((await stream.finalResponse()).output_text, ANSWER);
});
