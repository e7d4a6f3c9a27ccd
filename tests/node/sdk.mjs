// Drive a server with LangGraph's JavaScript SDK, and print what happened as JSON.
import { Client } from "@langchain/langgraph-sdk";

const client = new Client({ apiUrl: process.argv[2], apiKey: null });

async function collect(stream, until = () => false) {
  const chunks = [];
  for await (const chunk of stream) {
    chunks.push(chunk);
    if (until(chunks)) break;
  }
  return chunks;
}

async function takeTurn() {
  const { thread_id } = await client.threads.create();
  const input = { messages: [{ role: "user", content: "My canoe is called Nutshell" }] };
  const streamMode = ["values", "messages-tuple", "updates"];
  const chunks = await collect(client.runs.stream(thread_id, "chat", { input, streamMode }));
  const state = await client.threads.getState(thread_id);
  return {
    events: [...new Set(chunks.map((chunk) => chunk.event))],
    messages: state.values.messages.map((message) => message.type),
  };
}

// agent-chat-ui sends an empty input with the command that answers a question
async function answerQuestion(decision) {
  const { thread_id } = await client.threads.create();
  const input = { messages: [{ role: "user", content: "Send it" }] };
  await client.runs.wait(thread_id, "review", { input });
  const question = await client.threads.getState(thread_id);
  const command = { resume: { decisions: [decision] } };
  const options = { input: {}, command, streamMode: ["values"] };
  const chunks = await collect(client.runs.stream(thread_id, "review", options));
  const state = await client.threads.getState(thread_id);
  return {
    asked: question.tasks.flatMap((task) => task.interrupts).length,
    errors: chunks.filter((chunk) => chunk.event === "error"),
    next: state.next,
    last: state.values.messages.at(-1).content,
    tools: state.values.messages.filter((message) => message.type === "tool").map((message) => message.content),
  };
}

async function leaveThread() {
  const { thread_id } = await client.threads.create();
  const input = { messages: [{ role: "user", content: "Send it" }] };
  await client.runs.wait(thread_id, "review", { input });
  const options = { input: {}, command: { goto: "__end__" } };
  await client.runs.wait(thread_id, "review", options);
  return { next: (await client.threads.getState(thread_id)).next };
}

async function joinAgain() {
  const { thread_id } = await client.threads.create();
  let runId;
  const options = {
    input: { steps: [] },
    streamMode: ["updates"],
    streamResumable: true,
    onDisconnect: "continue",
    onRunCreated: (run) => (runId = run.run_id),
  };
  const isStep = (chunk) => chunk.event === "updates";
  const read = await collect(client.runs.stream(thread_id, "steps", options), (chunks) => chunks.filter(isStep).length === 2);
  const lastEventId = read.at(-1).id;
  const rest = await collect(client.runs.joinStream(thread_id, runId, { lastEventId, streamMode: ["updates"] }));
  return [...read, ...rest].filter(isStep).flatMap((chunk) => Object.keys(chunk.data));
}

const approve = { type: "approve" };
const reject = { type: "reject", message: "Not now" };
const edit = { type: "edit", edited_action: { name: "send", args: { text: "an edited text" } } };
console.log(
  JSON.stringify({
    turn: await takeTurn(),
    approve: await answerQuestion(approve),
    reject: await answerQuestion(reject),
    edit: await answerQuestion(edit),
    left: await leaveThread(),
    steps: await joinAgain(),
  }),
);
