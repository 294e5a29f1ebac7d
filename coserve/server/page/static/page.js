// Signs in where a key is needed, and keeps the page as the server is.

import { refreshModels } from "./chat.js";
import { refresh } from "./live.js";
import { currentKey, useKey } from "./server.js";
import "./chart.js";
import "./models.js";
import { localize } from "./times.js";
import "./training.js";

const $ = (id) => document.getElementById(id);
const needsKey = document.body.dataset.keys === "needed";
let models = null;

function show(isIn) {
  $("room").hidden = $("nav").hidden = !isIn;
  $("signout").hidden = !(needsKey && isIn);
  if ($("signin")) $("signin").hidden = isIn;
}

async function enter() {
  if (await refresh()) show(true);
}

// Models come and go with jobs.
document.addEventListener("refreshed", () => {
  const found = [...document.querySelectorAll("[data-models]")].map((each) => each.dataset.models).join(" ");
  if (found === models) return;
  models = found;
  refreshModels().catch(() => (models = null)); // the next time
});
document.addEventListener("unknown-key", (event) => {
  if (!needsKey) return location.reload(); // the server asks for keys now
  if (currentKey()) $("signin-error").textContent = event.detail;
  useKey("");
  show(false);
  $("key").focus();
});
$("signin-form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  $("signin-error").textContent = "";
  useKey($("key").value.trim());
  $("key").value = "";
  enter();
});
$("signout").addEventListener("click", () => {
  useKey("");
  location.reload();
});

localize(document.body);
if (!needsKey || currentKey()) enter();
else $("key").focus();
