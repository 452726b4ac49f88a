// The official JavaScript client against the server: `node openai_client.mjs PACKAGE BASE_URL MODEL` prints one JSON
// object with what the client made of each call; test_clients_node.py judges it.
import { pathToFileURL } from "node:url";

const [folder, baseURL, model] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(`${folder}/index.mjs`));
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour." }];
const ask = { model, messages, temperature: 0, max_completion_tokens: 400 };
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green", "blue"] }, is_glossy: { type: "boolean" } },
  required: ["colour", "is_glossy"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "paint", parameters: schema } }];

async function plain() {
  const answer = await client.chat.completions.create({ ...ask, max_completion_tokens: 12 });
  return { text: answer.choices[0].message.content, usage: answer.usage, request: answer._request_id };
}

async function streamed() {
  const stream = await client.chat.completions.create({
    ...ask, max_completion_tokens: 12, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null, finish = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  return { text, usage, finish };
}

async function structured() {
  const format = { type: "json_schema", json_schema: { name: "paint", schema, strict: true } };
  const answer = await client.chat.completions.parse({ ...ask, response_format: format });
  return { text: answer.choices[0].message.content, finish: answer.choices[0].finish_reason };
}

async function called() {
  const answer = await client.chat.completions.create({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false });
  const runner = client.chat.completions.stream({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false });
  const final = await runner.finalChatCompletion();
  const calls = (choice) => choice.message.tool_calls.map((call) => [call.id, call.function.name, call.function.arguments]);
  return { plain: calls(answer.choices[0]), streamed: calls(final.choices[0]), finish: answer.choices[0].finish_reason };
}

async function completions() {
  const answer = await client.completions.create({ model, prompt: ["One, two,", "Red,"], max_tokens: 4, temperature: 0 });
  return { indexes: answer.choices.map((choice) => choice.index), texts: answer.choices.map((choice) => choice.text) };
}

async function models() {
  const listed = [];
  for await (const entry of client.models.list()) listed.push(entry.id);
  return { listed, one: (await client.models.retrieve(model)).id };
}

async function responses() {
  const body = { model, input: "Name a colour.", temperature: 0, max_output_tokens: 12 };
  const answer = await client.responses.create(body);
  const events = [];
  let text = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    events.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { text: answer.output_text, streamed: text, first: events[0], last: events.at(-1), status: answer.status };
}

async function hangUp() {
  const stream = await client.chat.completions.create({ ...ask, max_completion_tokens: 4000, stream: true, ignore_eos: true });
  let seen = 0;
  for await (const _ of stream) if (++seen === 2) break;
  return { seen };
}

async function refusals() {
  const refusal = async (call) => {
    try { await call(); } catch (error) { return { kind: error.constructor.name, status: error.status, param: error.param, code: error.code }; }
    return null;
  };
  return {
    bad: await refusal(() => client.chat.completions.create({ ...ask, temperature: 3 })),
    missing: await refusal(() => client.chat.completions.create({ ...ask, model: "nope" })),
  };
}

const calls = { plain, streamed, structured, called, completions, models, responses, hangUp, refusals };
const results = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    results[name] = await call();
  } catch (error) {
    results[name] = { failed: String(error?.stack ?? error) };
  }
}
process.stdout.write(JSON.stringify(results));
