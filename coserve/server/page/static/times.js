// Writes moments in the reader's own time: the server sends them in UTC.

const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const sameYear = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const otherYear = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** A moment as a short text. seconds: of Unix time. */
export function when(seconds) {
  const [date, now] = [new Date(seconds * 1000), new Date()];
  const passed = (now - date) / 1000;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return (date.getFullYear() === now.getFullYear() ? sameYear : otherYear).format(date);
}

/** Rewrite every <time> below an element; the exact moment is its title. */
export function localize(element) {
  for (const each of element.querySelectorAll("time[datetime]")) {
    const date = new Date(each.getAttribute("datetime"));
    each.textContent = when(date / 1000);
    each.title = absolute.format(date);
  }
}
