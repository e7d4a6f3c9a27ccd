// Drive a server with CopilotKit's agent for LangGraph, and print what happened as JSON.
import { LangGraphAgent } from "@ag-ui/langgraph";

const agent = new LangGraphAgent({ deploymentUrl: process.argv[2], graphId: "review" });

async function run(parameters) {
  const events = [];
  await agent.runAgent(parameters, { onEvent: ({ event }) => void events.push(event) });
  return events;
}

agent.setMessages([{ id: "m1", role: "user", content: "Send it" }]);
const asked = await run({});
// the transcript is sent beside the command
const command = { resume: { decisions: [{ type: "approve" }] } };
const answered = await run({ forwardedProps: { command } });
const count = (events, type) => events.filter((event) => event.type === type).length;
console.log(
  JSON.stringify({
    questions: asked.filter((event) => event.name === "on_interrupt").length,
    finished: [count(asked, "RUN_FINISHED"), count(answered, "RUN_FINISHED")],
    errors: [...asked, ...answered].filter((event) => event.type === "RUN_ERROR").map((event) => event.message),
    messages: agent.messages.map((message) => message.role),
    last: agent.messages.at(-1).content,
  }),
);
process.exit(0);
