// OpenAI's client for Node: `node openai_node.mjs URL MODEL`; a line for each thing that works.

import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "hello" }];
const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
const tools = [
  ["weather", "city"],
  ["clock", "zone"],
].map(([name, argument]) => ({
  type: "function",
  function: { name, parameters: object({ [argument]: { type: "string" } }) },
}));

assert((await client.models.list()).data.some((each) => each.id === model));
console.log("models");

const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 60 });
assert.equal(answer.choices[0].message.content.trim(), "Hello!");
console.log("chat");

const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 60 });
assert.equal(await stream.finalContent(), answer.choices[0].message.content);
console.log("stream");

const asked = [{ role: "user", content: "weather" }];
const settings = { model, tools, temperature: 0, max_tokens: 100 };
const said = (await client.chat.completions.create({ ...settings, messages: asked })).choices[0].message;
assert("city" in JSON.parse(said.tool_calls[0].function.arguments));
const result = { role: "tool", tool_call_id: said.tool_calls[0].id, content: "rain" };
const after = await client.chat.completions.create({ ...settings, messages: [...asked, said, result] });
assert(after.choices[0].message.content);
console.log("tools");

const schema = object({ is_large: { type: "boolean" }, has_river: { type: "boolean" } });
const json = await client.chat.completions.parse({
  model,
  messages,
  max_tokens: 200,
  temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
});
assert.deepEqual(Object.keys(JSON.parse(json.choices[0].message.content)), ["is_large", "has_river"]);
console.log("structured output");

const text = await client.completions.create({ model, prompt: "hello", max_tokens: 4 });
assert(text.usage.completion_tokens <= 4);
console.log("completions");

const response = await client.responses.create({ model, input: "hello", temperature: 0, max_output_tokens: 60 });
assert.equal(response.output_text.trim(), "Hello!");
console.log("responses");

const line = JSON.stringify({ messages: [...messages, { role: "assistant", content: "Ahoy!" }] });
const file = await client.files.create({
  file: await toFile(Buffer.from(Array(8).fill(line).join("\n")), "chats.jsonl"),
  purpose: "fine-tune",
});
const hyperparameters = { n_epochs: 2, batch_size: 4 };
let job = await client.fineTuning.jobs.create({
  model,
  training_file: file.id,
  suffix: "ahoy",
  method: { type: "supervised", supervised: { hyperparameters } },
});
const untilMs = Date.now() + 120_000;
while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
  assert(Date.now() < untilMs);
  await new Promise((resolve) => setTimeout(resolve, 200));
  job = await client.fineTuning.jobs.retrieve(job.id);
}
assert.equal(job.status, "succeeded");
console.log("fine-tuning");
