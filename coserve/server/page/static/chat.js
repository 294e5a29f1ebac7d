// Chat with one model, or with two side by side.

import { capital } from "./live.js";
import { markdown } from "./markdown.js";
import { askJson, stream } from "./server.js";
import { when } from "./times.js";

const $ = (id) => document.getElementById(id);

/** A conversation with the model that its list names. */
class Pane {
  constructor(element) {
    this.element = element;
    this.models = element.querySelector("select");
    this.talk = element.querySelector(".talk");
    this.messages = [];
    this.abort = null;
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.talk.replaceChildren();
  }

  /** Say something, and show the answer as it comes. */
  async ask(text, settings) {
    this.#entry("mine", text);
    const isChat = $("now").dataset.chat === "yes";
    const answer = new Answer(this.#entry("theirs", ""), isChat && $("markdown").checked);
    this.messages.push({ role: "user", content: text });
    this.abort = new AbortController();
    this.talk.setAttribute("aria-busy", "true");
    try {
      for await (const event of stream(...this.#request(settings), this.abort.signal)) {
        const atEnd = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 40;
        answer.take(event);
        if (atEnd) this.talk.scrollTop = this.talk.scrollHeight;
      }
      answer.end();
    } catch (error) {
      answer.end(error.name === "AbortError" ? "Stopped" : capital(error.message));
    }
    if (answer.text) this.messages.push({ role: "assistant", content: answer.text });
    else this.messages.pop();
    this.talk.removeAttribute("aria-busy");
    this.talk.scrollTop = this.talk.scrollHeight;
    this.abort = null;
  }

  #request({ system, ...settings }) {
    const common = { model: this.models.value, stream: true, stream_options: { include_usage: true }, ...settings };
    if ($("now").dataset.chat !== "yes") {
      return ["v1/completions", { ...common, prompt: this.messages.at(-1).content }];
    }
    const first = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...common, messages: [...first, ...this.messages] }];
  }

  #entry(kind, text) {
    const entry = document.createElement("li");
    entry.className = kind;
    entry.textContent = text;
    this.talk.append(entry);
    this.talk.scrollTop = this.talk.scrollHeight;
    return entry;
  }
}

// Longer answers are drawn at their end: each time all of the text is read.
const MAX_DRAWN_AT_ONCE = 50_000;

/** One answer, and how quickly it came. */
class Answer {
  constructor(entry, isMarkdown) {
    this.entry = entry;
    this.said = document.createElement("div");
    this.said.className = isMarkdown ? "said markdown" : "said";
    this.entry.append(this.said);
    this.isMarkdown = isMarkdown;
    this.isDrawn = true;
    this.text = "";
    this.startMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.numTokens = 0;
  }

  take(event) {
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    const choice = event.choices[0];
    if (!choice) return;
    const said = choice.delta?.content ?? choice.text ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    if (!choice.delta?.role || said || thought) {
      this.lastMs = performance.now();
      this.firstMs ??= this.lastMs;
    }
    if (thought) this.#thoughts().append(thought);
    this.text += said;
    if (!said) return;
    if (!this.isMarkdown) this.said.append(said);
    else if (this.isDrawn && this.text.length < MAX_DRAWN_AT_ONCE) {
      this.isDrawn = false; // once for all tokens that come before the browser draws
      requestAnimationFrame(() => this.#draw());
    }
  }

  #draw() {
    this.said.replaceChildren(...(this.isMarkdown ? markdown(this.text) : [this.text]));
    this.isDrawn = true;
  }

  end(trouble = "") {
    this.#draw();
    const facts = document.createElement("p");
    facts.className = trouble && trouble !== "Stopped" ? "wrong" : "facts-line";
    facts.textContent = [trouble, this.#speed()].filter(Boolean).join("; ");
    this.entry.append(facts);
  }

  #speed() {
    if (this.firstMs === null) return "";
    const first = `first token after ${Math.round(this.firstMs - this.startMs)} ms`;
    if (this.numTokens < 2 || this.lastMs === this.firstMs) return first;
    const perSecond = ((this.numTokens - 1) * 1000) / (this.lastMs - this.firstMs);
    return `${first}, ${perSecond.toPrecision(3)} tokens/s, ${this.numTokens} tokens`;
  }

  #thoughts() {
    let thoughts = this.entry.querySelector(".thoughts");
    if (!thoughts) {
      thoughts = document.createElement("div");
      thoughts.className = "thoughts";
      this.entry.prepend(thoughts);
    }
    return thoughts;
  }
}

const panes = [...document.querySelectorAll(".pane")].map((element) => new Pane(element));
const open = () => panes.filter((pane) => !pane.element.hidden);

function settings() {
  const temperature = $("temperature").valueAsNumber;
  const maxTokens = $("max-tokens").valueAsNumber;
  return {
    system: $("system").value.trim(),
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    ...(Number.isNaN(maxTokens) ? {} : { max_tokens: maxTokens }),
  };
}

function showOptions(list, groups) {
  const chosen = list.value;
  list.replaceChildren(
    ...groups.map(([name, ids]) => {
      const group = document.createElement("optgroup");
      group.label = name;
      group.append(...ids.map(([id, created]) => new Option(created ? `${id} (${when(created)})` : id, id)));
      return group;
    }),
  );
  if (groups.some(([, ids]) => ids.some(([id]) => id === chosen))) list.value = chosen;
}

/** Ask which models there are, and list them. */
export async function refreshModels() {
  const { data } = await askJson("v1/models?checkpoints=true");
  const tuned = data.slice(1).map((model) => [model.id, model.created]);
  const isCheckpoint = ([name]) => name.includes(":ckpt-step-");
  const groups = [
    ["The model", data.slice(0, 1).map((model) => [model.id])],
    ["Fine-tuned", tuned.filter((model) => !isCheckpoint(model)).reverse()],
    ["Checkpoints", tuned.filter(isCheckpoint).reverse()],
  ].filter(([, ids]) => ids.length);
  for (const list of [...panes.map((pane) => pane.models), $("train-model")]) showOptions(list, groups);
}

/** Talk to a model, beside what is open. */
export async function talkTo(name) {
  await refreshModels();
  if (!$("beside").checked) $("beside").click();
  panes[1].models.value = name;
  $("chat").scrollIntoView();
  $("prompt").focus({ preventScroll: true });
}

$("beside").addEventListener("change", (event) => {
  panes[1].element.hidden = !event.target.checked;
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || $("send").disabled) return;
  $("prompt").value = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  await Promise.all(open().map((pane) => pane.ask(text, settings())));
  $("send").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => {
  for (const pane of panes) pane.abort?.abort();
  $("prompt").focus();
});
$("clear").addEventListener("click", () => {
  for (const pane of panes) pane.clear();
  $("prompt").focus();
});
