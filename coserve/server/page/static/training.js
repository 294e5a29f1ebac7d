// From a file to a job: upload it, see what will be trained, start the job, and what can be done with it then.

import { talkTo } from "./chat.js";
import { refresh, say } from "./live.js";
import { askJson, part, upload } from "./server.js";

const $ = (id) => document.getElementById(id);
const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
const text = (id) => $(id).value.trim() || undefined;
let file = null;

async function take(given) {
  const [progress, trouble] = [$("uploaded"), $("upload-error")];
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", given);
  trouble.textContent = "";
  $("start").hidden = true;
  progress.hidden = false;
  try {
    file = await upload("v1/files", form, (share) => (progress.value = share));
    await showExamples();
    say(`${file.filename} is uploaded`);
  } catch (error) {
    trouble.textContent = error.message;
  }
  progress.hidden = true;
}

async function showExamples() {
  const length = number("length");
  const found = await part(`ui/files/${file.id}/examples${length ? `?max_sequence_length=${length}` : ""}`);
  $("start").hidden = found.querySelector("[data-readable=no]") !== null;
  $("examples").replaceChildren(...found.childNodes);
}

function job() {
  const isFresh = $("train-model").selectedIndex === 0;
  return {
    model: $("train-model").value,
    training_file: file.id,
    suffix: text("suffix"),
    method: {
      type: "supervised",
      supervised: { hyperparameters: { n_epochs: number("epochs"), batch_size: number("batch") } },
    },
    coserve: {
      adapter: isFresh && number("rank") ? { type: "lora", r: number("rank") } : undefined,
      optimizer: { learning_rate: number("rate") },
      checkpoint_every_steps: number("every"),
      max_sequence_length: number("length"),
      live: $("serve-live").checked,
    },
  };
}

async function start() {
  const button = $("start").querySelector("button");
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
  if (action === "cancel" && !confirm("End this job? What it has learned stays in its checkpoints.")) return;
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

$("file").addEventListener("change", (event) => {
  const [given] = event.target.files;
  if (given) take(given);
  event.target.value = ""; // so that the same file can be chosen again
});
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind.startsWith("drag") && kind !== "dragleave");
    if (kind === "drop" && event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}
$("length").addEventListener("change", () => {
  if (file) showExamples().catch((error) => ($("start-error").textContent = error.message));
});
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
