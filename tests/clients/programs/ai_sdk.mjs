// The AI SDK with three providers: openai-compatible, OpenAI (Responses by default, or .chat) and Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ADAPTER, AGENT_QUESTION, ANSWER, BASE, CARD_QUESTION, KEY, QUESTION, RESULTS, V1 } from "./feature.mjs";
import { equal, feature, hasBoth, isScarf } from "./feature.mjs";

const server = { baseURL: V1, apiKey: KEY };
const compatible = createOpenAICompatible({
  ...server,
  name: "manylora",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI(server);
const anthropic = createAnthropic(server);
const PROVIDERS = {
  "openai-compatible": (name) => compatible(name),
  "openai (Responses)": (name) => openai(name),
  "openai.chat": (name) => openai.chat(name),
  anthropic: (name) => anthropic(name),
};
const Card = z.object({ item: z.string(), material: z.string(), price: z.int(), in_stock: z.boolean() });
// What a model without any sense can fill, where the SDK asks for a call and not for an answer.
const Pick = z.object({ item: z.enum(["scarf", "cloak"]), in_stock: z.boolean() });
const inputSchema = z.object({ item: z.string() });
const tools = Object.fromEntries(
  Object.entries(RESULTS).map(([name, result]) => [
    name,
    tool({ description: "Asks the shop.", inputSchema, execute: async () => result }),
  ]),
);
const greedy = { temperature: 0, maxRetries: 0, maxOutputTokens: 200 };

for (const [name, model] of Object.entries(PROVIDERS)) {
  await feature(`${name}: generateText`, async () => {
    equal((await generateText({ ...greedy, model: model(ADAPTER), prompt: QUESTION })).text, ANSWER);
  });

  await feature(`${name}: streamText`, async () => {
    const errors = [];
    const onError = ({ error }) => errors.push(error);
    const result = streamText({ ...greedy, model: model(ADAPTER), prompt: QUESTION, onError });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    if (errors.length) throw errors[0];
    equal(text, ANSWER);
    equal((await result.usage).outputTokens > 0, true);
  });

  await feature(`${name}: tools`, async () => {
    const stopWhen = stepCountIs(5);
    const result = await generateText({ ...greedy, model: model(BASE), prompt: AGENT_QUESTION, tools, stopWhen });
    equal(hasBoth(result.text), true);
  });

  await feature(`${name}: tools streamed`, async () => {
    const errors = [];
    const onError = ({ error }) => errors.push(error);
    const request = { model: model(BASE), prompt: AGENT_QUESTION, tools, toolChoice: "required", onError };
    const calls = await streamText({ ...greedy, ...request }).toolCalls;
    if (errors.length) throw errors[0];
    equal(calls[0].input.item, "rug");
  });

  await feature(`${name}: Output.object`, async () => {
    const isCall = name === "anthropic";
    const output = Output.object({ schema: isCall ? Pick : Card });
    const result = await generateText({ ...greedy, model: model(BASE), prompt: CARD_QUESTION, output });
    equal(isCall ? Pick.safeParse(result.output).success : isScarf(result.output), true);
  });
}

await feature("openai-compatible: completionModel", async () => {
  const result = await generateText({ ...greedy, maxOutputTokens: 4, model: compatible.completionModel(BASE), prompt: "a" });
  equal(result.text.length > 0, true);
});
