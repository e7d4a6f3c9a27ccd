// Sends the forms of a thread's page, shows the output of a run while it runs, and then reloads the page.
// Without this script, browsers send the forms themselves.
"use strict";
(() => {
  const HIDDEN = /[^\P{C}\n\t]|[\u2028\u2029\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0]/gu; // as `render_text_with_hidden_characters_shown` in pages.py
  const NAMES = {human: "user", ai: "assistant", AIMessageChunk: "assistant"};
  const CLASSES = {user: "human", assistant: "ai", tool: "tool"};
  const at = (id) => document.getElementById(id);
  const tell = (text) => { at("told").textContent = text; };
  const visible = (text) => text.replace(HIDDEN, (c) => `<U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`);
  let following = false;

  // A place at the end of the log for what somebody says.
  function place(name) {
    const [article, head, text, bdi] = ["article", "h3", "div", "bdi"].map((tag) => document.createElement(tag));
    article.className = `said ${CLASSES[name] ?? "other"}`;
    head.textContent = visible(name);
    text.className = "text";
    text.append(bdi);
    article.append(head, text);
    at("said").append(article);
    return bdi;
  }

  async function* events(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const frames = (rest + part.value).split(/\r?\n\r?\n/);
      rest = frames.pop();
      for (const frame of frames) {
        const fields = Object.fromEntries(frame.split(/\r?\n/).map((line) => [line.split(": ", 1)[0], line.slice(line.indexOf(": ") + 2)]));
        if (fields.data) yield [fields.event.split("|")[0], JSON.parse(fields.data)];
      }
    }
  }

  // Shows the messages of a run as they come; returns why they ended, "" if it did as it should.
  async function listen(path) {
    const places = new Map();
    const reply = await fetch(path);
    if (!reply.ok) return (await reply.json()).detail;
    for await (const [event, data] of events(reply.body)) {
      if (event === "error") return `${data.error}: ${data.message}`;
      if (event !== "messages") continue;
      const [message] = data, blocks = [message.content].flat();
      const text = blocks.map((block) => block.text ?? (typeof block === "string" ? block : "")).join("");
      if (!text) continue;
      const below = document.documentElement.scrollHeight - innerHeight - scrollY;
      if (!places.has(message.id)) places.set(message.id, place(NAMES[message.type] ?? message.name ?? message.type));
      places.get(message.id).append(visible(text));
      if (below < 100) scrollTo(0, document.documentElement.scrollHeight);
    }
    return "";
  }

  // The page as it is now; what is being written, and where, stays.
  async function renew() {
    const draft = at("say")?.value, focused = document.activeElement;
    const inside = focused.closest("#talk");
    const reply = await fetch(location.href);
    if (!reply.ok || reply.redirected) return location.reload();
    const main = document.querySelector("main");
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    page.getElementById("told").replaceWith(at("told"));
    main.replaceChildren(...page.querySelector("main").childNodes);
    htmx.process(main);
    if (draft && at("say")) at("say").value = draft;
    if (inside) (at(focused.id) ?? at("say") ?? at("talk")).focus({preventScroll: true});
  }

  async function follow() {
    if (following) return;
    following = true;
    try {
      for (let path = at("talk").dataset.events; path; path = at("talk").dataset.events) {
        tell("A run is in progress.");
        const why = await listen(path);
        await renew();
        const asks = document.querySelector(".question");
        tell(why ? `The run failed: ${visible(why)}` : asks ? "The graph waits for an answer." : "The run has ended.");
      }
    } catch {
      tell("The connection was lost. Reload the page.");
    }
    following = false;
  }

  addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.closest("#talk")) return;
    event.preventDefault();
    if (form.dataset.sent) return; // twice
    form.dataset.sent = "yes";
    const text = form.elements.text;
    try {
      const body = new URLSearchParams(new FormData(form, event.submitter));
      const reply = await fetch(form.action, {method: "POST", body, headers: {Accept: "application/json"}});
      const run = await reply.json();
      if (!reply.ok) return tell(visible(run.detail));
      if (text) {
        place("user").append(visible(text.value));
        form.reset();
      }
      if (!at("talk").dataset.events) {
        at("talk").dataset.events = run.events;
        at("stop").action = run.stop;
        at("stop").hidden = false;
      }
      follow();
    } catch {
      tell("The form could not be sent. Send it again.");
    } finally {
      delete form.dataset.sent;
    }
  });

  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "say") event.target.form.requestSubmit();
  });

  follow();
})();
