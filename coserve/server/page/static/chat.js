// Chat with one model, or with two side by side.

import { capital } from "./live.js";
import { askJson, stream } from "./server.js";

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
    const answer = new Answer(this.#entry("theirs", ""));
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

/** One answer, and how quickly it came. */
class Answer {
  constructor(entry) {
    this.entry = entry;
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
    if (said) this.entry.append(said);
    this.text += said;
  }

  end(trouble = "") {
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
      group.append(...ids.map((id) => new Option(id, id)));
      return group;
    }),
  );
  if (groups.some(([, ids]) => ids.includes(chosen))) list.value = chosen;
}

/** Ask which models there are, and list them. */
export async function refreshModels() {
  const { data } = await askJson("v1/models?checkpoints=true");
  const names = data.map((model) => model.id);
  const isCheckpoint = (name) => name.includes(":ckpt-step-");
  const groups = [
    ["The model", names.slice(0, 1)],
    ["Fine-tuned", names.slice(1).filter((name) => !isCheckpoint(name)).reverse()],
    ["Checkpoints", names.slice(1).filter(isCheckpoint).reverse()],
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
