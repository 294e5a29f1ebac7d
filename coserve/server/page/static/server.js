// The server's routes, asked with the key where one is needed.
//
// The key lives in this tab's session storage: the browser sends it nowhere by itself (no other site can have it used, as
// a cookie could be, and no server at another port is sent it), another origin cannot read it, and it is gone with the
// tab. What could read it is a script of this page, and its policy lets none but these files run.

const KEY = "coserve-key";

/** The key in use; "" without one. */
export const currentKey = () => sessionStorage.getItem(KEY) ?? "";

/** Use another from now on; "" for none. */
export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What a server says that it will not do. status: of HTTP; 0 if it did not answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = (given = {}) => (currentKey() ? { ...given, Authorization: `Bearer ${currentKey()}` } : given);

function reason(status, text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered ${status}`;
  }
}

/** An answer of 2xx; throws a Refusal otherwise. path: relative, so that a proxy may put something before it. */
export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers), credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  const refusal = new Refusal(answer.status, reason(answer.status, await answer.text()));
  if (refusal.status === 401) document.dispatchEvent(new CustomEvent("unknown-key", { detail: refusal.message }));
  throw refusal;
}

/** JSON from the server. body: sent as JSON, by POST, if there is one. */
export async function askJson(path, { method = "GET", body, signal } = {}) {
  const options = body === undefined ? { method, signal } : { ...jsonBody(body), signal };
  return (await ask(path, options)).json();
}

const jsonBody = (body) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
});

/** The events of a stream, each as JSON. */
export async function* stream(path, body, signal) {
  const answer = await ask(path, { ...jsonBody(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Refusal(answer.status, parsed.error.message);
      yield parsed;
    }
  }
}

/** Send a file; told how much of it is there. Not by fetch, which does not say that. */
export function upload(path, form, progressed) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => progressed(event.loaded / event.total);
    request.onerror = () => reject(new Refusal(0, "the server does not answer"));
    request.onload = () =>
      request.status < 300
        ? resolve(JSON.parse(request.responseText))
        : reject(new Refusal(request.status, reason(request.status, request.responseText)));
    request.send(form);
  });
}

// The only place where text becomes elements: the server's own templates, which have escaped all that others wrote.
const policy = window.trustedTypes?.createPolicy("coserve", { createHTML: (text) => text });

/** A part of the page from the server, as elements. */
export async function part(path) {
  const text = await (await ask(path)).text();
  return new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/html").body;
}
