// Models that jobs have made: downloaded as they are or merged into their base, or deleted.

import { refreshModels } from "./chat.js";
import { refresh, say } from "./live.js";
import { ask } from "./server.js";

const busy = new Set(); // ids of the buttons whose download has not ended

/** Save an answer of the server as a file; the key goes in a header, so a plain link would not do. */
async function save(path) {
  const answer = await ask(path);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") ?? "")?.[1] ?? "model.zip";
  const url = URL.createObjectURL(await answer.blob());
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function download(button) {
  const { download: job, merge } = button.dataset;
  const isMerged = merge === "yes";
  if (isMerged && !confirm("The server writes the whole model in float32 for this, which may take minutes.")) return;
  busy.add(button.id);
  button.disabled = true;
  say(isMerged ? "The model is being merged" : "The download begins");
  try {
    await save(`v1/fine_tuning/jobs/${encodeURIComponent(job)}/archive${isMerged ? "?merge=true" : ""}`);
    say("Downloaded");
  } catch (error) {
    alert(error.message);
  }
  busy.delete(button.id);
  const now = document.getElementById(button.id);
  if (now) now.disabled = false;
}

async function remove({ delete: name }) {
  if (!confirm(`Delete ${name} with its checkpoints? This cannot be undone.`)) return;
  try {
    await ask(`v1/models/${encodeURIComponent(name)}`, { method: "DELETE" });
    say("The model is deleted");
  } catch (error) {
    alert(error.message);
  }
  await refresh();
  await refreshModels();
}

// The list is made anew every two seconds.
document.addEventListener("refreshed", () => {
  for (const id of busy) document.getElementById(id)?.setAttribute("disabled", "");
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.download) download(button);
  if (button?.dataset.delete) remove(button.dataset);
});
