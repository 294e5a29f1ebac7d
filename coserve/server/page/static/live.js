// Keeps the numbers and the jobs as they are at the server, as long as somebody can see the page.

import { morph } from "./morph.js";
import { part } from "./server.js";
import { localize } from "./times.js";

const EVERY_MS = 2000;
const trouble = document.getElementById("trouble");
let numJobs = "";
let span = "0"; // of time that the rates are shown for: its place in the server's list
let waiting = null;
// Answers may overtake one another: an older one must not undo what a newer one has shown.
let numAsked = 0;
let newestShown = 0;

/** Ask now, and from now on; whether the server let this page in. */
export async function refresh() {
  clearTimeout(waiting);
  const serial = ++numAsked;
  try {
    const asked = new URLSearchParams({ span, ...(numJobs && { jobs: numJobs }) });
    const found = await part(`ui/live?${asked}`);
    if (serial < newestShown) return true;
    newestShown = serial;
    localize(found);
    const focused = document.activeElement?.id;
    for (const id of ["now", "jobs", "models"]) morph(document.getElementById(id), found.querySelector(`#${id}`));
    if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true });
    trouble.hidden = true;
    document.dispatchEvent(new Event("refreshed"));
  } catch (error) {
    if (error.status === 401) return false;
    trouble.textContent = `${capital(error.message)}; this page tries again.`;
    trouble.hidden = false;
  }
  clearTimeout(waiting);
  if (!document.hidden) waiting = setTimeout(refresh, EVERY_MS);
  return true;
}

/** As the beginning of a sentence. */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Say something to those who listen to the page. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !document.getElementById("room").hidden) refresh();
});
document.addEventListener("click", (event) => {
  const { jobs, span: wanted } = event.target.closest("#more, [data-span]")?.dataset ?? {};
  if (!jobs && !wanted) return;
  numJobs = jobs ?? numJobs;
  span = wanted ?? span;
  refresh();
});
