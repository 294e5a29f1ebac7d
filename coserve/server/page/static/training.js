// From a file to a job: upload it, see what will be trained, start the job, and what can be done with it then.

import { talkTo } from "./chat.js";
import { refresh, say } from "./live.js";
import { askJson, part, upload } from "./server.js";

const $ = (id) => document.getElementById(id);
const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
const text = (id) => $(id).value.trim() || undefined;
let file = null;
let validation = null;

async function send(given, progress) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", given);
  progress.hidden = false;
  try {
    return await upload("v1/files", form, (share) => (progress.value = share));
  } finally {
    progress.hidden = true;
  }
}

async function take(given) {
  $("upload-error").textContent = "";
  $("start").hidden = true;
  try {
    file = await send(given, $("uploaded"));
    $("method-choice").hidden = false;
    await showExamples();
    say(`${file.filename} is uploaded`);
  } catch (error) {
    $("upload-error").textContent = error.message;
  }
}

async function takeValidation(given) {
  $("start-error").textContent = "";
  try {
    useValidation(await send(given, $("validation-uploaded")));
    say(`${validation.filename} is uploaded`);
  } catch (error) {
    $("start-error").textContent = error.message;
  }
}

function useValidation(given) {
  validation = given;
  const name = given ? `Validation: ${given.filename}` : "Drop a validation file here, or choose one (optional)";
  $("validation-name").textContent = name;
  $("validation-remove").hidden = !given;
}

async function showExamples() {
  const length = number("length");
  const asked = new URLSearchParams({ method: $("method").value, ...(length && { max_sequence_length: length }) });
  const found = await part(`ui/files/${file.id}/examples?${asked}`);
  $("start").hidden = found.querySelector("[data-readable=no]") !== null;
  $("examples").replaceChildren(...found.childNodes);
}

function job() {
  const isFresh = $("train-model").selectedIndex === 0;
  const method = $("method").value;
  return {
    model: $("train-model").value,
    training_file: file.id,
    validation_file: validation?.id,
    suffix: text("suffix"),
    method: { type: method, [method]: { hyperparameters: { n_epochs: number("epochs"), batch_size: number("batch") } } },
    coserve: {
      adapter: isFresh && number("rank") ? { type: "lora", r: number("rank") } : undefined,
      optimizer: { learning_rate: number("rate"), schedule: $("schedule").value, warmup_steps: number("warmup") },
      checkpoint_every_steps: number("every"),
      max_sequence_length: number("length"),
      live: $("serve-live").checked,
    },
  };
}

async function start() {
  const button = $("start").querySelector("button[type=submit]");
  $("start-error").textContent = "";
  button.disabled = true;
  try {
    const { id } = await askJson("v1/fine_tuning/jobs", { body: job() });
    await refresh();
    say("The job has begun");
    $(id)?.scrollIntoView({ block: "nearest" });
  } catch (error) {
    $("start-error").textContent = error.message;
  }
  button.disabled = false;
}

const DONE = { pause: "paused", resume: "resumed", cancel: "cancelled" };

async function change({ job, action }) {
  if (action === "cancel" && !confirm("Cancel this job? Its checkpoints remain.")) return;
  try {
    await askJson(`v1/fine_tuning/jobs/${job}/${action}`, { method: "POST" });
    say(`The job is ${DONE[action]}`);
  } catch (error) {
    alert(error.message);
  }
  await refresh();
  const next = $(`${job}-${action}`) ?? $(`${job}-resume`) ?? $(`${job}-pause`) ?? $(job)?.querySelector("button");
  next?.focus();
}

/** Take files that are chosen with an input, or dropped on an element. */
function receive(input, place, taken) {
  input.addEventListener("change", (event) => {
    const [given] = event.target.files;
    if (given) taken(given);
    event.target.value = ""; // so that the same file can be chosen again
  });
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    place.addEventListener(kind, (event) => {
      event.preventDefault();
      place.classList.toggle("over", kind.startsWith("drag") && kind !== "dragleave");
      if (kind === "drop" && event.dataTransfer.files.length) taken(event.dataTransfer.files[0]);
    });
  }
}

receive($("file"), $("drop"), take);
receive($("validation-file"), $("validation-drop"), takeValidation);
$("validation-remove").addEventListener("click", () => useValidation(null));
for (const id of ["length", "method"]) {
  $(id).addEventListener("change", () => {
    if (file) showExamples().catch((error) => ($("upload-error").textContent = error.message));
  });
}
$("train-model").addEventListener("change", () => {
  $("rank").disabled = $("train-model").selectedIndex !== 0; // an adapter that is trained further has its own
});
$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.action) change(button.dataset);
  if (button?.dataset.talk) talkTo(button.dataset.talk);
});
