"use strict";
// Builds what is long from the page's data when it is opened; links lead to what is not built yet.
let parsed;
const data = () => (parsed ||= JSON.parse(document.getElementById("data").textContent));

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
const table = (head, rows) =>
  make("table", {}, make("thead", {}, make("tr", {}, ...head.map((h) => make("th", {}, h)))),
    make("tbody", {}, ...rows));
const row = (cells, cls) =>
  make("tr", cls ? { class: cls } : {}, ...cells.map((c) => make("td", Array.isArray(c) && c.length > 1 ? { class: "many" } : {}, ...[c].flat())));
const spaced = (parts) => parts.flatMap((p, k) => (k ? [", ", p] : [p]));

// Which steps make, read and run what, by graph; built once a graph is looked into.
const indexes = new Map();
function index(n) {
  if (indexes.has(n)) return indexes.get(n);
  const found = { makers: new Map(), readers: new Map(), instructions: new Map(), pairs: new Map(), words: new Map() };
  for (const x of [...data().graphs[n].inputs, ...data().graphs[n].results].reverse()) if (x.is && x.name) found.words.set(x.name, x.is);
  data().graphs[n].steps.forEach((s, k) => {
    for (const b of s.writes) found.makers.set(b, k);
    for (const b of s.reads) found.readers.set(b, [...(found.readers.get(b) || []), k]);
    if (s.instruction !== null) found.instructions.set(`${s.program}/${s.instruction}`, k);
    for (const name of [s.name, ...s.parts]) if (!found.pairs.has(name)) found.pairs.set(name, k);
  });
  indexes.set(n, found);
  return found;
}
const stepLink = (n, k) => link(`g${n}s${k}`, data().graphs[n].steps[k].name);
function bufferLinks(n, names) {
  const known = new Set((data().graphs[n].programs[0] || { buffers: [] }).buffers.map((b) => b.name));
  return spaced(names.map((b) => (known.has(b) ? link(`g${n}b-${b}`, called(n, b)) : called(n, b))));
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
  for (const o of s.origin) places.set(o.where, [...(places.get(o.where) || []), o.op]);
  body.append(table(["your line", "", "ATen operators"], [...places].map(([where, ops]) =>
    row([link(`line-${where}`, where || "no line"), make("code", {}, g.lines[where] || ""), ops.join(", ")]))));
  if (s.why) body.append(make("p", {}, `${s.why}.`));
  if (s.accesses.length) body.append(table(["buffer", "", "bytes", "its elements are visited"], s.accesses.map((a) =>
    row([bufferLinks(n, [a.buffer]), a.writes ? "written" : "read", bytes(a.nbytes),
      { "in order": "side by side", "by data": "at positions that data says", "in pieces": "side by side, in pieces",
        across: `${a.stride} elements apart: they lie along another loop`, apart: `${a.stride} elements apart` }[a.order]],
      ["across", "apart"].includes(a.order) && a.nbytes >= 65536 ? "worst" : ""))));
  else body.append(make("p", {}, "reads ", ...bufferLinks(n, s.reads), "; makes ", ...bufferLinks(n, s.writes)));
  const facts = [];
  if (s.space) facts.push(`${s.space} points`);
  if (s.estimate_ns) facts.push(`estimated at ${(s.estimate_ns / 1000).toFixed(1)} us on one core`);
  if (s.time_ns) facts.push(`measured ${(s.time_ns / 1000).toFixed(1)} us, ${((s.read_nbytes + s.written_nbytes) / s.time_ns).toFixed(1)} GB/s`);
  if (s.time_ns && s.precision) facts.push(`${(s.operations / s.time_ns).toFixed(1)} G operations a second of ${s.precision}`);
  if (s.device) facts.push(`on ${s.device}`);
  const line = make("p", {}, facts.join("; "));
  if (s.instruction !== null) line.append(facts.length ? "; " : "", link(`g${n}p${s.program}i${s.instruction}`, `instruction ${s.instruction}`));
  body.append(line);
  const source = g.kernel_sources[s.name];
  if (s.loops) {
    body.append(make("div", { class: "two" },
      make("div", {}, make("h4", {}, "Loops"), make("pre", { tabindex: "0" }, s.loops)),
      make("div", {}, make("h4", {}, "Generated source"), make("pre", { tabindex: "0" }, source || "(as another kernel's, or none)"))));
  } else if (source) body.append(make("pre", { tabindex: "0" }, source));
  details.append(body);
}

function refusals(details) {
  const n = Number(details.dataset.graph), by = new Map();
  for (const r of data().graphs[n].refusals) {
    if (!by.has(r.kind)) by.set(r.kind, []);
    by.get(r.kind).push(r);
  }
  const named = (name) => (index(n).pairs.has(name) ? link(`g${n}s${index(n).pairs.get(name)}`, name) : name);
  for (const [kind, found] of by)
    details.append(make("details", {}, make("summary", {}, `${found.length} x ${kind}`), make("ul", {}, ...found.slice(0, 100).map((r) =>
      make("li", {}, ...r.pair.flatMap((x, k) => (k ? [" and ", named(x)] : [named(x)])), `: ${r.reason}`)),
      ...(found.length > 100 ? [make("li", {}, `and ${found.length - 100} more`)] : []))));
}

function buffers(details) {
  const n = Number(details.dataset.graph), { makers, readers } = index(n);
  const words = { arena: "in the arena", own: "allocated", reused: "on the memory of ", call: "made by an operator", input: "an input" };
  details.append(table(["buffer", "type", "bytes", "memory", "instructions", "steps"],
    data().graphs[n].programs[0].buffers.map((b) => {
      const at = (i) => (i < 0 ? "the start" : i >= data().graphs[n].programs[0].instructions.length ? "the end" : link(`g${n}p0i${i}`, i));
      const read = readers.get(b.name) || [];
      const r = row([called(n, b.name), b.type, bytes(b.nbytes), words[b.where] + (b.on || "") + (b.offset === null ? "" : ` at ${b.offset}`), make("span", {}, at(b.born), " to ", at(b.dies)),
        [...(makers.has(b.name) ? ["made by ", stepLink(n, makers.get(b.name)), "; "] : []),
          ...(read.length ? ["read by ", ...spaced(read.slice(0, 8).map((k) => stepLink(n, k)))] : []), read.length > 8 ? ` and ${read.length - 8} more` : ""]]);
      r.id = `g${n}b-${b.name}`;
      return r;
    })));
}

function instructions(details) {
  const n = Number(details.dataset.graph), p = Number(details.dataset.program);
  const ran = index(n).instructions;
  details.append(make("ol", { class: "list", start: "0" }, ...data().graphs[n].programs[p].instructions.map((text, i) => {
    const k = ran.get(`${p}/${i}`);
    return make("li", { id: `g${n}p${p}i${i}` }, text, ...(k === undefined ? [] : ["  ", link(`g${n}s${k}`, "↑ its row")]));
  })));
}

function lines(details) {
  const by = new Map();
  data().graphs.forEach((g, n) => g.steps.forEach((s, k) => {
    for (const where of new Set(s.origin.map((o) => o.where))) {
      if (!by.has(where)) by.set(where, { text: g.lines[where] || "", steps: [] });
      by.get(where).steps.push([n, k]);
    }
  }));
  details.append(table(["line", "", "kernels and calls"], [...by].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true })).map(([where, l]) => {
    const r = row([where || "no line", make("code", {}, l.text), spaced(l.steps.slice(0, 40).map(([n, k]) => stepLink(n, k)))]);
    r.id = `line-${where}`;
    return r;
  })));
}

const builders = { step, refusals, buffers, instructions, lines,
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
  else if ((m = id.match(/^g(\d+)p(\d+)i/))) open(document.querySelector(`.instructions[data-graph="${m[1]}"][data-program="${m[2]}"]`));
  else if (id.startsWith("line-")) open(document.querySelector(".lines"));
  const e = document.getElementById(id);
  if (!e) return;
  for (let d = e.closest("details"); d; d = d.parentElement.closest("details")) open(d);
  for (const old of document.querySelectorAll(".found")) old.classList.remove("found");
  e.classList.add("found");
  e.scrollIntoView({ block: "center" });
  if (e.matches(".step")) e.firstElementChild.focus({ preventScroll: true });
}
function open(details) { if (details) { build(details); details.open = true; } }
const follow = () => { if (location.hash) reveal(decodeURIComponent(location.hash.slice(1))); };
addEventListener("hashchange", follow);
document.addEventListener("click", (e) => {  // also where the address is there already
  const a = e.target.closest("a[href^='#']");
  if (a && a.getAttribute("href") === location.hash) follow();
});

const search = document.getElementById("search");
const rows = [...document.querySelectorAll(".step")];
function find() {
  const wanted = search.value.trim().toLowerCase();
  for (const r of rows) {
    const [, n, k] = r.id.match(/g(\d+)s(\d+)/), s = data().graphs[n].steps[k];
    const text = [s.name, ...s.reads, ...s.writes, ...s.origin.flatMap((o) => [o.where, o.op])].join(" ").toLowerCase();
    r.classList.toggle("hidden", wanted !== "" && !text.includes(wanted));
  }
}
search.addEventListener("input", find);
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.altKey || e.metaKey) return;
  if (e.key === "Escape" && document.activeElement === search) { search.value = ""; find(); search.blur(); return; }
  if (document.activeElement === search) return;
  if (e.key === "/") { e.preventDefault(); search.focus(); search.scrollIntoView(); return; }
  const by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[e.key];
  const here = document.activeElement.closest(".step");
  if (!by || (e.key.startsWith("Arrow") && document.activeElement.tagName !== "SUMMARY") || (e.key.startsWith("Arrow") && !here)) return;
  const shown = rows.filter((r) => !r.classList.contains("hidden"));
  const next = shown[here ? shown.indexOf(here) + by : 0];
  if (next) { e.preventDefault(); next.firstElementChild.focus(); next.scrollIntoView({ block: "nearest" }); }
});
addEventListener("beforeprint", () => { if (rows.length <= 200) for (const d of document.querySelectorAll("details")) open(d); });
follow();
