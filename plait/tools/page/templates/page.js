"use strict";
// Builds what is long when somebody comes to it: rows of steps from a short text each, all else from
// the data of the report, which is parsed at its first use. Links lead to what is not built yet.
const parse = (id) => JSON.parse(document.getElementById(id).textContent);
const texts = parse("rows");
let parsed;
const data = () => (parsed ||= parse("data"));

function make(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);  // text stays text
  return e;
}
const link = (to, text) => make("a", { href: "#" + to }, text);
const bytes = (n) => {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  return `${n} B`;
};
const time = (ns) => {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]])
    if (ns >= size) return `${(ns / size).toFixed(1)} ${unit}`;
  return `${Math.round(ns)} ns`;
};
const table = (head, rows) =>
  make("table", {}, make("thead", {}, make("tr", {}, ...head.map((h) => make("th", {}, h)))),
    make("tbody", {}, ...rows));
const row = (cells, cls) =>
  make("tr", cls ? { class: cls } : {}, ...cells.map((c) => make("td", Array.isArray(c) && c.length > 1 ? { class: "many" } : {}, ...[c].flat())));
// A long list in pieces, each of which is built when it comes into view. build(k) makes the k-th.
const PIECE = 100, FEW = 600;
const lists = new Map();
const seen = new IntersectionObserver((found) => { for (const e of found) if (e.isIntersecting) fill(e.target); }, { rootMargin: "600px" });
function list(id, box, length, build, height) {
  const pieces = [];
  for (let from = 0; from < length; from += PIECE) {
    const piece = make("div", { class: "piece", style: `height:${Math.min(PIECE, length - from) * height}rem` });
    pieces.push({ piece, from, to: Math.min(from + PIECE, length), build });
    piece.of = pieces.at(-1);
    box.append(piece);
    if (length > FEW) seen.observe(piece); else fill(piece);
  }
  lists.set(id, pieces);
}
function fill(piece) {
  const { from, to, build } = piece.of;
  if (piece.firstChild) return;
  piece.append(...Array.from({ length: to - from }, (_, k) => build(from + k)));
  piece.removeAttribute("style");
  seen.unobserve(piece);
}
function item(id, k) {
  const found = (lists.get(id) || [])[Math.floor(k / PIECE)];
  if (found) fill(found.piece);
}
const spaced = (parts) => parts.flatMap((p, k) => (k ? [", ", p] : [p]));

// Which steps make, read and run what, by graph; built once a graph is looked into.
const indexes = new Map();
function index(n) {
  if (indexes.has(n)) return indexes.get(n);
  const found = { makers: new Map(), readers: new Map(), instructions: new Map(), words: new Map(), buffers: new Map(), apart: new Map() };
  for (const b of (data().graphs[n].programs[0] || { buffers: [] }).buffers) found.buffers.set(b.name, b);
  for (const r of data().graphs[n].refusals) for (const k of new Set(r.steps)) found.apart.set(k, [...(found.apart.get(k) || []), r]);
  for (const x of [...data().graphs[n].inputs, ...data().graphs[n].results].reverse()) if (x.is && x.name) found.words.set(x.name, x.is);
  data().graphs[n].steps.forEach((s, k) => {
    for (const b of s.writes) found.makers.set(b, k);
    for (const b of s.reads) { if (!found.readers.has(b)) found.readers.set(b, []); found.readers.get(b).push(k); }
    if (s.instruction !== null) found.instructions.set(`${s.program}/${s.instruction}`, k);
  });
  indexes.set(n, found);
  return found;
}
const stepLink = (n, k) => link(`g${n}s${k}`, texts[n][k][1]);
// Steps of one name are links behind each other: k 2 3.
function stepLinks(steps) {
  const by = new Map();
  for (const [n, k] of steps) by.set(texts[n][k][1], [...(by.get(texts[n][k][1]) || []), [n, k]]);
  return spaced([...by.values()].map((alike) => make("span", {}, ...alike.flatMap(([n, k], i) => (i ? [" ", link(`g${n}s${k}`, i + 1)] : [stepLink(n, k)])))));
}
function bufferLinks(n, names) {
  return spaced(names.map((b) => (index(n).buffers.has(b) ? link(`g${n}b-${b}`, called(n, b)) : called(n, b))));
}
// The user's name of a buffer beside its own, where there is one.
function called(n, b) {
  const words = index(n).words.get(b);
  return words ? `${words} (${b})` : b;
}

function step(details) {
  const [, n, k] = details.id.match(/g(\d+)s(\d+)/).map(Number);
  const g = data().graphs[n], s = g.steps[k];
  const body = make("div", { class: "body" });
  const places = new Map();
  for (const o of s.origin) places.set(o.where, [...(places.get(o.where) || []), o.op === "output" ? "the layout of a result" : o.op]);
  body.append(table(["your line", "", "ATen operators"], [...places].map(([where, ops]) =>
    row([link(`line-${where}`, where || "no line"), make("code", {}, g.lines[where] || ""), ops.join(", ")]))));
  if (s.module) body.append(make("p", {}, "in module ", make("code", {}, s.module)));
  if (s.why) body.append(make("p", {}, `${s.why}.`));
  const type = (b) => make("code", {}, (index(n).buffers.get(b) || { type: "" }).type);
  if (s.accesses.length) body.append(table(["buffer", "", "bytes", "type", "its elements are visited"], s.accesses.map((a) =>
    row([bufferLinks(n, [a.buffer]), a.writes ? "written" : "read", bytes(a.nbytes), type(a.buffer),
      { "in order": "side by side", "by data": "at positions that data says", "in pieces": "side by side, in pieces",
        across: `${a.stride} elements apart: they lie along another loop`, apart: `${a.stride} elements apart` }[a.order]],
      ["across", "apart"].includes(a.order) && a.nbytes >= 65536 ? "worst" : ""))));
  else body.append(table(["buffer", "", "type"], [...s.reads.map((b) => row([bufferLinks(n, [b]), "read", type(b)])), ...s.writes.map((b) => row([bufferLinks(n, [b]), "made", type(b)]))]));
  const facts = [];
  if (s.space) facts.push(`${s.space} points`);
  if (s.estimate_ns) facts.push(`estimated at ${time(s.estimate_ns)} on one core`);
  if (s.time_ns) facts.push(`measured ${time(s.time_ns)}, ${((s.read_nbytes + s.written_nbytes) / s.time_ns).toFixed(1)} GB/s`);
  if (s.time_ns && s.precision) facts.push(`${(s.operations / s.time_ns).toFixed(1)} G operations a second of ${s.precision}`);
  if (s.device) facts.push(`on ${s.device}`);
  const line = make("p", {}, facts.join("; "));
  if (s.instruction !== null) line.append(facts.length ? "; " : "", link(`g${n}p${s.program}i${s.instruction}`, `instruction ${s.instruction}`));
  body.append(line);
  const apart = index(n).apart.get(k) || [];
  if (apart.length) body.append(make("details", {}, make("summary", {}, `Not fused with: ${apart.length}`), make("ul", {}, ...apart.slice(0, 30).map((r) => refused(n, r)), ...more(apart.length, 30))));
  const source = g.kernel_sources[s.name];
  if (s.loops) {
    body.append(make("div", { class: "two" },
      make("div", {}, make("h4", {}, "Loops"), make("pre", { tabindex: "0" }, s.loops)),
      make("div", {}, make("h4", {}, "Generated source"), make("pre", { tabindex: "0" }, source || "(as another kernel's, or none)"))));
  } else if (source) body.append(make("pre", { tabindex: "0" }, source));
  details.append(body);
}

const more = (length, shown) => (length > shown ? [make("li", {}, `and ${length - shown} more`)] : []);
function refused(n, r) {
  const named = (name, k) => (k === null ? name : link(`g${n}s${k}`, name.startsWith("buf") ? `${data().graphs[n].steps[k].name} (${name})` : name));
  return make("li", {}, ...r.pair.flatMap((x, i) => [i ? " and " : "", named(x, r.steps[i])]), `: ${r.reason}`);
}
function refusals(details) {
  const n = Number(details.dataset.graph), by = new Map();
  for (const r of data().graphs[n].refusals) {
    if (!by.has(r.kind)) by.set(r.kind, []);
    by.get(r.kind).push(r);
  }
  for (const [kind, found] of by)
    details.append(make("details", {}, make("summary", {}, `${found.length} x ${kind}`), make("p", { class: "legend" }, data().graphs[n].meanings[kind] || ""),
      make("ul", {}, ...found.slice(0, 100).map((r) => refused(n, r)), ...more(found.length, 100))));
}

function given(details) {
  const g = data().graphs[Number(details.dataset.graph)], n = Number(details.dataset.graph);
  const rows = (found, text) => found.map((x) => row([index(n).buffers.has(x.name) ? link(`g${n}b-${x.name}`, x.is ? `${x.is} (${x.name})` : x.name) : called(n, x.name), text(x)]));
  const type = (x) => make("code", {}, x.text ? x.text.slice(x.text.indexOf("(") + 1, -1) : (index(n).buffers.get(x.name) || { type: "" }).type);
  details.append(make("h4", {}, "Inputs"), table(["your name and the program's", "type"], rows(g.inputs, type)),
    make("h4", {}, "Results"), table(["your name and the program's", "type"], rows(g.results.filter((x) => x.name), type)));
}

function buffers(details) {
  const n = Number(details.dataset.graph), { makers, readers } = index(n);
  const words = { arena: "in the arena", own: "allocated", reused: "", call: "made by an operator", input: "an input" };
  details.append(table(["buffer", "type", "bytes", "memory", "instructions", "steps"],
    data().graphs[n].programs[0].buffers.map((b) => {
      const at = (i) => (i < 0 ? "the start" : i >= data().graphs[n].programs[0].instructions.length ? "the end" : link(`g${n}p0i${i}`, i));
      const read = readers.get(b.name) || [];
      const r = row([called(n, b.name), b.type, bytes(b.nbytes), [words[b.where], b.on && `on the memory of ${b.on}`, b.offset !== null && `at ${b.offset}`].filter(Boolean).join(" "), make("span", {}, at(b.born), " to ", at(b.dies)),
        [...(makers.has(b.name) ? ["made by ", stepLink(n, makers.get(b.name)), read.length ? "; " : ""] : []),
          ...(read.length ? ["read by ", ...stepLinks(read.slice(0, 8).map((k) => [n, k]))] : []), read.length > 8 ? ` and ${read.length - 8} more` : ""]]);
      r.id = `g${n}b-${b.name}`;
      return r;
    })));
}

function instructions(details) {
  const n = Number(details.dataset.graph), p = Number(details.dataset.program), id = `g${n}p${p}i`;
  const ran = index(n).instructions, found = data().graphs[n].programs[p].instructions;
  const box = make("div", { class: "list", role: "list" });
  details.append(box);
  list(id, box, found.length, (i) => {
    const k = ran.get(`${p}/${i}`);
    return make("div", { id: id + i, role: "listitem" }, make("span", { class: "at" }, i), make("span", {}, found[i], ...(k === undefined ? [] : ["  ", link(`g${n}s${k}`, "↑ its row")])));
  }, 1.5);
}

function lines(details) {
  const by = new Map();
  data().graphs.forEach((g, n) => g.steps.forEach((s, k) => {
    const wheres = new Set(s.origin.map((o) => o.where));
    for (const where of wheres) {
      if (!by.has(where)) by.set(where, { text: "", ns: 0, steps: [] });
      const l = by.get(where);
      l.text ||= g.lines[where] || "";
      l.ns += (s.time_ns || 0) / wheres.size;
      l.steps.push([n, k]);
    }
  }));
  details.append(make("p", { class: "legend" }, "A step's time is shared evenly by the lines that it was made of."));
  details.append(table(["line", "", "time", "kernels and calls"], [...by].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true })).map(([where, l]) => {
    const r = row([where || "no line", make("code", {}, l.text), l.ns ? time(l.ns) : "", [...stepLinks(l.steps.slice(0, 40)), l.steps.length > 40 ? ` and ${l.steps.length - 40} more` : ""]]);
    r.id = `line-${where}`;
    return r;
  })));
}

const builders = { step, refusals, given, buffers, instructions, lines,
  drawing: (d) => { if (d.dataset.graph in data().drawings) d.querySelector(".scroll").innerHTML = data().drawings[d.dataset.graph]; } };
function build(details) {
  const kind = Object.keys(builders).find((k) => details.classList.contains(k));
  if (kind && !details.dataset.built) { details.dataset.built = "1"; builders[kind](details); }
}
document.addEventListener("toggle", (e) => { if (e.target.open) build(e.target); }, true);

// A link may lead into something that is closed or not there yet.
function reveal(id) {
  let m;
  if ((m = id.match(/^g(\d+)b-/))) open(document.querySelector(`.buffers[data-graph="${m[1]}"]`));
  else if ((m = id.match(/^(g(\d+)p(\d+)i)(\d+)$/))) { open(document.querySelector(`.instructions[data-graph="${m[2]}"][data-program="${m[3]}"]`)); item(m[1], Number(m[4])); }
  else if ((m = id.match(/^(g\d+s)(\d+)$/))) { if (matched && !matched.has(id)) { search.value = ""; find(); } item(m[1], Number(m[2])); }
  else if (id.startsWith("line-")) open(document.querySelector(".lines"));
  const e = document.getElementById(id);
  if (!e) return;
  for (let d = e.closest("details"); d; d = d.parentElement.closest("details")) open(d);
  for (const old of document.querySelectorAll(".found")) old.classList.remove("found");
  e.classList.add("found");
  e.scrollIntoView({ block: e.matches(".step") ? "start" : "center" });
  if (e.matches(".step")) e.firstElementChild.focus({ preventScroll: true });
}
function open(details) { if (details) { build(details); details.open = true; } }
const follow = () => { if (location.hash) reveal(decodeURIComponent(location.hash.slice(1))); };
addEventListener("hashchange", follow);
document.addEventListener("click", (e) => {  // also where the address is there already
  const a = e.target.closest("a[href^='#']");
  if (a && a.getAttribute("href") === location.hash) follow();
});

// Rows of steps. matched: ids of those that a search found; null without one.
let matched = null;
const search = document.getElementById("search");
for (const box of document.querySelectorAll(".steps")) {
  const n = Number(box.dataset.graph);
  list(`g${n}s`, box, texts[n].length, (k) => {
    const [kind, ...cells] = texts[n][k], id = `g${n}s${k}`;
    const spans = cells.map((c, i) => make("span", i === 0 ? { class: "name" } : i === 1 ? { class: "where" } : c.startsWith("about") ? { class: "guess" } : {}, c));
    return make("details", { class: `step ${kind}${matched && !matched.has(id) ? " hidden" : ""}`, id }, make("summary", { class: "row" }, ...spans));
  }, 1.95);
}

// Search: the first of the rows that fit are built.
function find() {
  const wanted = search.value.trim().toLowerCase();
  matched = wanted === "" ? null : new Set();
  if (matched) data().graphs.forEach((g, n) => g.steps.forEach((s, k) => {
    const text = [s.name, s.module, ...s.reads, ...s.writes, ...s.origin.flatMap((o) => [o.where, o.op]), ...[...s.reads, ...s.writes].map((b) => index(n).words.get(b) || "")].join(" ");
    if (text.toLowerCase().includes(wanted)) matched.add(`g${n}s${k}`);
  }));
  let built = 0;
  for (const [id, pieces] of lists) if (/^g\d+s$/.test(id)) for (const { piece, from, to } of pieces) {
    let here = matched ? 0 : to - from;
    if (matched) for (let k = from; k < to; k++) here += matched.has(id + k);
    if (here && matched && (built += here) <= FEW) fill(piece);
    piece.classList.toggle("hidden", !here);
    for (const r of piece.children) r.classList.toggle("hidden", matched !== null && !matched.has(r.id));
  }
  document.getElementById("found").textContent = matched ? `${matched.size} found` : "";
}
search.addEventListener("input", find);

// The row that is `by` rows from one, or from none; null where there are no more.
function neighbour(row, by) {
  let n = 0, k = -1;
  if (row) [, n, k] = row.id.match(/g(\d+)s(\d+)/).map(Number);
  for (;;) {
    k += by;
    while (n < texts.length && k >= texts[n].length) [n, k] = [n + 1, 0];
    while (n > 0 && k < 0) [n, k] = [n - 1, texts[n - 1].length - 1];
    if (n >= texts.length || k < 0) return null;
    if (matched && !matched.has(`g${n}s${k}`)) continue;
    item(`g${n}s`, k);
    return document.getElementById(`g${n}s${k}`);
  }
}
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.altKey || e.metaKey) return;
  if (e.key === "Escape" && document.activeElement === search) { search.value = ""; find(); search.blur(); return; }
  if (document.activeElement === search) return;
  if (e.key === "/") { e.preventDefault(); search.focus(); search.scrollIntoView(); return; }
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[e.key];
  const here = document.activeElement.closest(".step");
  if (!by || (e.key.startsWith("Arrow") && document.activeElement.tagName !== "SUMMARY") || (e.key.startsWith("Arrow") && !here)) return;
  const next = neighbour(here, by);
  if (next) { e.preventDefault(); next.firstElementChild.focus(); next.scrollIntoView({ block: "nearest" }); }
});
addEventListener("beforeprint", () => { if (texts.flat().length <= 200) for (const d of document.querySelectorAll("details")) open(d); });
follow();
