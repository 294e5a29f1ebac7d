// Markdown of an answer as elements: the part of CommonMark that models write, and GitHub's tables.
//
// What a model says never becomes HTML: elements are made one by one, text goes into text nodes, and links lead to
// http, https and mailto alone. Every pattern is bounded, so that no text takes long.

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
// In the order in which they are tried at each place of a line.
const INLINE = [
  [/\\([!-/:-@[-`{-~])/y, (found) => found[1]],
  [/(`{1,9})([^`](?:[^`]|`(?!\1)){0,2000}?)\1(?!`)/y, (found) => element("code", [found[2].trim() || found[2]])],
  [/\[([^[\]]{1,500})\]\(<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\))?)>?(?:\s+"[^"]{0,200}")?\)/y, link],
  [/\*\*(?=\S)([^]{0,1000}?\S)\*\*(?!\*)/y, (found, depth) => element("strong", inline(found[1], depth + 1))],
  [/(?<!\w)__(?=\S)([^]{0,1000}?\S)__(?!\w)/y, (found, depth) => element("strong", inline(found[1], depth + 1))],
  [/~~(?=\S)([^]{0,1000}?\S)~~/y, (found, depth) => element("del", inline(found[1], depth + 1))],
  [/\*(?=[^\s*])([^*]{0,999}[^\s*])\*/y, (found, depth) => element("em", inline(found[1], depth + 1))],
  [/\*(?=\S)(\S)\*/y, (found) => element("em", [found[1]])],
  [/(?<!\w)_(?=[^\s_])([^_]{0,999}?[^\s_]|[^\s_])_(?!\w)/y, (found, depth) => element("em", inline(found[1], depth + 1))],
  [/<?(https?:\/\/[^\s<>()"'*`]{1,2000}[^\s<>()"'*`.,:;!?])>?/y, (found) => link([found[0], found[1], found[1]], MAX_DEPTH)],
  [/ {2,}\n|\\\n/y, () => document.createElement("br")],
];
const SPECIAL = /[\\`[*_~<h ]/g;

function element(name, children, settings = {}) {
  const made = Object.assign(document.createElement(name), settings);
  for (const child of children) made.append(child); // there may be more than a call takes arguments
  return made;
}

function link([whole, text, target], depth) {
  if (!SAFE_LINK.test(target)) return whole;
  const settings = { href: target, target: "_blank", rel: "noopener noreferrer nofollow" };
  return element("a", depth < MAX_DEPTH ? inline(text, depth + 1) : [text], settings);
}

/** The elements and texts of a line, or of several. */
function inline(text, depth = 0) {
  if (depth >= MAX_DEPTH) return [text];
  const made = [];
  let plain = 0;
  let place = 0;
  while (place < text.length) {
    SPECIAL.lastIndex = place;
    const special = SPECIAL.exec(text);
    if (!special) break;
    place = special.index;
    let after = place + 1;
    for (const [pattern, make] of INLINE) {
      pattern.lastIndex = place;
      const found = pattern.exec(text);
      if (!found) continue;
      after = place + found[0].length;
      made.push(text.slice(plain, place), make(found, depth));
      plain = after;
      break;
    }
    place = after;
  }
  made.push(text.slice(plain));
  return made.filter((each) => each !== "");
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines) {
  const row = (line, kind) => element("tr", cells(line).map((cell) => element(kind, inline(cell))));
  const body = element("tbody", lines.slice(2).map((line) => row(line, "td")));
  const head = element("thead", [row(lines[0], "th")]);
  return element("div", [element("table", [head, body])], { className: "table", tabIndex: 0 });
}

/** Lines of one list, from an item on: the list, and the first line after it. */
function list(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let at = start;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const width = found[0].length;
    const inner = [lines[at].slice(width)];
    at += 1;
    for (; at < lines.length; at += 1) {
      const line = lines[at];
      const isBlank = !line.trim();
      const next = isBlank ? lines[at + 1] : line;
      const isInside = next?.trim() && next.search(/\S/) >= Math.min(width, indent.length + 2);
      if (!isInside && (isBlank || ITEM.test(line) || startsBlock(line))) break;
      inner.push(isBlank ? "" : line.slice(Math.min(width, Math.max(0, line.search(/\S/)))));
    }
    items.push(element("li", blocks(inner, depth + 1)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  const made = element(isOrdered ? "ol" : "ul", items);
  if (isOrdered) made.start = parseInt(mark, 10);
  return [made, at];
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);

function title([, marks, text]) {
  const shown = text.trimEnd().replace(/(?:^|\s)#{1,20}$/, "");
  return element("p", inline(shown), { className: `heading h${marks.length}` });
}

function fenced(lines, start) {
  const [, fence, info] = FENCE.exec(lines[start]);
  const [language] = info.trim().split(/\s/);
  let end = start + 1;
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = element("code", [lines.slice(start + 1, end).join("\n")]);
  const made = element("pre", [code], { tabIndex: 0 });
  if (language) made.dataset.language = language;
  return [made, end + 1];
}

function quoted(lines, start, depth) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [element("blockquote", blocks(inner, depth + 1)), end];
}

function paragraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !ITEM.test(lines[end])) end += 1;
  return [element("p", inline(lines.slice(start, end).join("\n"))), end];
}

function tableAt(lines, start) {
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return [table(lines.slice(start, end)), end];
}

/** The block that begins at a line, and the first line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return fenced(lines, at);
  if (heading) return [title(heading), at + 1];
  if (RULE.test(line)) return [element("hr", []), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoted(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return tableAt(lines, at);
  return paragraph(lines, at);
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [one, after] = block(lines, at, depth);
    made.push(one);
    at = after;
  }
  return made;
}

/** The elements of a text in Markdown. */
export const markdown = (text) => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
