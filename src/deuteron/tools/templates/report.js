"use strict";
// The page's own script: the table of steps and the plots, from the data in the page. Text of the
// user's is put in as text (textContent), never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) node.setAttribute(k, v);
  node.append(...children);
  return node;
}
function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes || {})) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  return node;
}
function digits(x) { return x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2); }
function us(x) { return x >= 1e6 ? digits(x / 1e6) + " s" : x >= 1e3 ? digits(x / 1e3) + " ms" : digits(x) + " µs"; }
function amount(x, unit) {
  for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (x >= scale) return digits(x / scale) + " " + prefix + unit;
  return Math.round(x) + " " + unit;
}
const base = (file) => file.slice(file.lastIndexOf("/") + 1);
const place = (p) => [p.module, p.file ? base(p.file) + ":" + p.line : ""].filter(Boolean).join(" · ");

// ------------------------------------------------------------------------------------ the steps
const steps = [];
for (const [k, part] of data.parts.entries()) {
  for (const s of part.steps) {
    if (s.kind === "view") continue;
    const places = s.places.map((n) => part.places[n]);
    const counts = new Map();
    for (const o of s.ops) if (o.op !== "getitem") counts.set(o.op, (counts.get(o.op) || 0) + 1);
    const what = s.kind === "kernel" ? [...counts].map(([o, n]) => (n > 1 ? o + " ×" + n : o)).join(", ") : s.name.replace("aten.", "").replace(".default", "");
    const where = [...new Set(places.map((p) => p.module || place(p)))].concat(
      [...new Set(places.filter((p) => p.module && p.file).map((p) => base(p.file) + ":" + p.line))]).join(", ");
    const words = [where, what, s.name, ...places.map((p) => p.code + " " + p.file)].join(" ").toLowerCase();
    steps.push({ ...s, step: s, part, partNumber: k, where, what, words });
  }
}
const byId = new Map(steps.map((s) => [s.id, s]));
const why = new Map(data.findings.flatMap((f) => f.steps.map((id) => [id, f.why])));
let order = { key: "lost_us", down: true }, shown = [], here = -1;

function bar(share) {
  const inner = el("i", { style: "width:" + (100 * share).toFixed(1) + "%" });
  return el("span", { class: "bar" }, inner);
}
function rowOf(s) {
  const row = el("tr", { class: "row", tabindex: "0", "data-id": s.id, "aria-expanded": "false" });
  const number = (text) => el("td", { class: "n" }, text);
  row.append(
    el("td", { title: s.where }, el("div", { class: "clamp" }, el("span", { class: "dot " + s.kind, title: s.kind }), s.where || "—")),
    el("td", { title: s.what }, s.what), number(us(s.lost_us)),
    number(us(s.us) + (s.measured_us === null ? " *" : "")),
    el("td", { class: "n" }, bar(s.share), Math.round(100 * s.share) + " %"), number(us(s.limit_us)),
    number(amount(s.bytes, "B")), number(amount(s.flops, "")),
    el("td", { class: "mono", title: s.name }, s.name));
  return row;
}
function fill() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const part = $("phase").value, kind = $("kind").value;
  shown = steps.filter((s) => (!part || s.part.id === part) && (!kind || s.kind === kind) && words.every((w) => s.words.includes(w)));
  const sign = order.down ? -1 : 1;
  shown.sort((a, b) => {
    const x = a[order.key], y = b[order.key];
    return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
  });
  const body = document.createDocumentFragment();
  for (const s of shown) body.append(rowOf(s));
  $("table").tBodies[0].replaceChildren(body);
  // What a step repeats is in its time.
  const total = shown.reduce((t, s) => t + (!part && s.part.phase === "chunk" ? 0 : s.us), 0);
  const predicted = shown.some((s) => s.measured_us === null) ? "; * predicted" : "";
  $("count").textContent = shown.length + " of " + steps.length + ", " + us(total) + predicted;
  here = -1;
}
function list(title, items) {
  const box = el("div", {}, el("h4", {}, title));
  box.append(el("ul", {}, ...items.map((i) => (typeof i === "string" ? el("li", {}, i) : i))));
  return box;
}
function detail(s) {
  const left = el("div"), right = el("div");
  if (why.has(s.id)) left.append(list("Why time is lost", why.get(s.id)));
  left.append(list("From", s.places.map((k) => {
    const p = s.part.places[k];
    return [p.module && p.module + " (" + p.class + ")", p.file && p.file + ":" + p.line + "  " + p.code].filter(Boolean).join(" — ");
  })));
  left.append(list("Operations in order", s.ops.map((o) => {
    const item = el("li", {}, o.op + (o.place >= 0 ? "  " + place(s.part.places[o.place]) : ""));
    if (o.again) item.append(" ", el("span", { class: "again" }, "computed again"));
    return item;
  })));
  const tensor = (n) => { const t = s.part.tensors[n]; return t ? t.label + "  " + t.layout + "  " + amount(t.bytes, "B") : n; };
  left.append(list("Reads", s.reads.map(tensor)), list("Writes", s.writes.map(tensor)));
  const facts = [
    "limit " + us(s.limit_us) + " (" + s.limit + "), predicted " + us(s.predicted_us) + (s.measured_us === null ? "" : ", measured " + us(s.measured_us)),
    amount(s.bytes, "B") + ", " + amount(s.flops, "FLOP") + ", " + digits(s.flops / Math.max(s.bytes, 1)) + " FLOP per byte",
  ];
  s.notes.forEach((n) => facts.push(n));
  if (s.reason) facts.push("a library call because: " + s.reason);
  s.configs.forEach((c, k) => facts.push((k === (s.hardware.config || 0) ? "tiling: " : "another tiling: ") + c));
  const h = s.hardware;
  if (h.threads) facts.push(h.registers + " registers of a thread, " + h.spilled_bytes + " B spilled, " +
    amount(h.shared_bytes, "B") + " shared; " + h.programs + " programs of " + h.threads + " threads, " +
    h.programs_per_core + " at a time on a multiprocessor: " + h.waves + " waves" + (h.tensor_cores ? "; tensor cores" : ""));
  right.append(list("Figures", facts));
  right.append(el("h4", {}, "Loops"), el("pre", {}, s.nest));
  if (s.source && data.sources[s.source])
    right.append(el("h4", {}, s.language + " (" + s.source + ")"), el("pre", {}, data.sources[s.source]));
  const cell = el("td", { colspan: "9" }, el("div", { class: "detail" }, left, right));
  return el("tr", { class: "open" }, cell);
}
function toggle(row) {
  const next = row.nextElementSibling, isOpen = next && next.className === "open";
  row.setAttribute("aria-expanded", String(!isOpen));
  if (isOpen) next.remove(); else row.after(detail(byId.get(row.dataset.id)));
}
function go(k) {
  const rows = [...$("table").querySelectorAll("tr.row")];
  if (!rows.length) return;
  if (here >= 0 && rows[here]) rows[here].classList.remove("here");
  here = Math.max(0, Math.min(rows.length - 1, k));
  rows[here].classList.add("here");
  rows[here].focus({ preventScroll: true });
  rows[here].scrollIntoView({ block: "nearest" });
}
function show(id) {
  $("search").value = ""; $("phase").value = ""; $("kind").value = "";
  fill();
  const k = shown.findIndex((s) => s.id === id);
  $("steps").scrollIntoView();
  go(k);
  const row = $("table").querySelectorAll("tr.row")[k];
  if (row && row.getAttribute("aria-expanded") === "false") toggle(row);
  if (row) row.scrollIntoView({ block: "start" });
}
$("table").tBodies[0].addEventListener("click", (e) => {
  const row = e.target.closest("tr.row");
  if (row && !String(getSelection())) { go([...$("table").querySelectorAll("tr.row")].indexOf(row)); toggle(row); }
});
$("table").tHead.addEventListener("click", (e) => {
  const head = e.target.closest("th");
  if (!head) return;
  const key = head.dataset.key, textual = ["where", "what", "name"].includes(key);
  order = { key, down: order.key === key ? !order.down : !textual };
  for (const h of $("table").tHead.querySelectorAll("th")) {
    h.classList.toggle("sorted", h === head);
    h.textContent = h.textContent.replace(/ [↓↑]$/, "") + (h === head ? (order.down ? " ↓" : " ↑") : "");
  }
  fill();
});
for (const id of ["search", "phase", "kind"]) $(id).addEventListener("input", fill);
for (const b of document.querySelectorAll("[data-show]")) b.addEventListener("click", () => show(b.dataset.show));

// ------------------------------------------------------------------------------------ the plots
function frame(width, height) {
  return draw("svg", { viewBox: "0 0 " + width + " " + height, role: "img" });
}
function titled(node, text) { node.append(draw("title", {}, text)); return node; }
function memory(box) {
  const part = data.parts[+box.dataset.part], live = part.memory.live, W = 1000, H = 170, top = 22, low = 140, left = 80;
  const svg = frame(W, H), most = Math.max(1, ...live), x = (k) => left + (W - left - 15) * k / Math.max(1, live.length);
  for (const f of [0, 0.5, 1]) {
    const y = low - (low - top) * f;
    svg.append(draw("line", { class: "grid", x1: left, x2: W - 15, y1: y, y2: y }));
    svg.append(draw("text", { class: "soft", x: left - 8, y: y + 4, "text-anchor": "end" }, amount(most * f, "B")));
  }
  let path = "M" + x(0) + " " + low;
  live.forEach((b, k) => { const y = low - (low - top) * b / most; path += "L" + x(k) + " " + y + "L" + x(k + 1) + " " + y; });
  svg.append(draw("path", { class: "area", d: path + "L" + x(live.length) + " " + low + "Z" }));
  const at = x(part.memory.peak_step + 0.5);
  svg.append(draw("line", { class: "peak", x1: at, x2: at, y1: top - 8, y2: low }));
  svg.append(draw("text", { class: "soft", x: left, y: H - 8 }, "step 0"));
  svg.append(draw("text", { class: "soft", x: W - 15, y: H - 8, "text-anchor": "end" }, "step " + (live.length - 1)));
  box.replaceChildren(svg);
}
function timeline(part) {
  const W = 1000, H = 92, left = 10, total = part.steps.reduce((t, s) => t + s.us, 0) || 1, svg = frame(W, H);
  let at = 0;
  for (const s of part.steps) {
    if (s.kind === "view") continue;
    const width = (W - 2 * left) * s.us / total;
    const r = draw("rect", { class: s.kind, x: left + at, y: 14, width: Math.max(0.4, width - 0.6), height: 40, "data-id": s.id });
    svg.append(titled(r, s.name + "\n" + (byId.get(s.id) || s).where + "\n" + us(s.us)));
    const h = 40 * s.share;
    svg.append(draw("rect", { x: left + at, y: 54 - h, width: Math.max(0.4, width - 0.6), height: h, fill: "#000", "fill-opacity": 0.22, "pointer-events": "none" }));
    at += width;
  }
  svg.append(draw("text", { class: "soft", x: left, y: 76 }, "0"));
  svg.append(draw("text", { class: "soft", x: W - left, y: 76, "text-anchor": "end" }, us(total)));
  svg.append(draw("text", { class: "soft", x: W / 2, y: 76, "text-anchor": "middle" }, "blue: kernels, orange: library calls; the dark part is the share of the device's limit"));
  svg.addEventListener("click", (e) => { if (e.target.dataset.id) show(e.target.dataset.id); });
  $("timeline").replaceChildren(svg);
}
function roofline(part) {
  const W = 1000, H = 380, left = 90, right = 20, top = 20, low = 330, svg = frame(W, H);
  const points = part.steps.filter((s) => s.kind !== "view" && s.bytes > 0 && s.flops > 0 && s.us > 0);
  if (!points.length) { $("roofline").replaceChildren(el("p", { class: "note" }, "No step computes anything.")); return; }
  const device = data.devices[points[0].device], bw = device.bandwidth_gbps;
  const units = Object.entries(device.gflops).filter(([u]) => points.some((s) => s.unit === u));
  const peak = Math.max(...units.map(([, g]) => g), device.gflops.f32);
  const X = points.map((s) => s.flops / s.bytes), Y = points.map((s) => s.flops / s.us / 1e3);
  const x0 = Math.log10(Math.min(...X, 0.1)) - 0.2, x1 = Math.log10(Math.max(...X, 2 * peak / bw)) + 0.2;
  const y0 = Math.log10(Math.min(...Y)) - 0.3, y1 = Math.log10(peak) + 0.25;
  const px = (v) => left + (W - left - right) * (Math.log10(v) - x0) / (x1 - x0);
  const py = (v) => low - (low - top) * (Math.log10(v) - y0) / (y1 - y0);
  for (let e = Math.ceil(x0); e <= x1; e++) {
    svg.append(draw("line", { class: "grid", x1: px(10 ** e), x2: px(10 ** e), y1: top, y2: low }));
    svg.append(draw("text", { class: "soft", x: px(10 ** e), y: low + 18, "text-anchor": "middle" }, e >= 0 ? String(10 ** e) : (10 ** e).toFixed(-e)));
  }
  for (let e = Math.ceil(y0); e <= y1; e++) {
    svg.append(draw("line", { class: "grid", x1: left, x2: W - right, y1: py(10 ** e), y2: py(10 ** e) }));
    svg.append(draw("text", { class: "soft", x: left - 8, y: py(10 ** e) + 4, "text-anchor": "end" }, amount(10 ** e * 1e9, "FLOP/s")));
  }
  for (const [u, g] of units.length ? units : [["f32", device.gflops.f32]]) {
    const ridge = g / bw, a = 10 ** x0, b = 10 ** x1;
    const start = Math.max(a, 10 ** y0 / bw);
    svg.append(draw("path", { class: "axis", fill: "none", d: "M" + px(start) + " " + py(start * bw) + "L" + px(ridge) + " " + py(g) + "L" + px(b) + " " + py(g) }));
    svg.append(draw("text", { class: "soft", x: px(b) - 4, y: py(g) - 5, "text-anchor": "end" }, u + ": " + amount(g * 1e9, "FLOP/s")));
  }
  const longest = Math.max(...points.map((p) => p.us));
  points.forEach((s, k) => {
    const r = 3 + 9 * Math.sqrt(s.us / longest);
    const c = draw("circle", { class: s.kind, cx: px(X[k]), cy: py(Y[k]), r, "fill-opacity": 0.65, "data-id": s.id });
    svg.append(titled(c, s.name + "\n" + (byId.get(s.id) || s).where + "\n" + us(s.us) + ", " + Math.round(100 * s.share) + " % of the limit"));
  });
  svg.append(draw("text", { class: "soft", x: (left + W) / 2, y: H - 12, "text-anchor": "middle" }, "FLOP per byte moved; area: time"));
  svg.addEventListener("click", (e) => { if (e.target.dataset.id) show(e.target.dataset.id); });
  $("roofline").replaceChildren(svg);
}
function layout(part) {
  // Rows: a step stands below all whose tensors it reads; in a row, near its makers.
  const maker = new Map(), rank = [], column = [], rows = [], edges = [];
  part.steps.forEach((s, k) => {
    let r = 0, sum = 0, n = 0;
    for (const name of s.reads) {
      const m = maker.get(name);
      if (m === undefined || m === k) continue;
      edges.push([m, k, name]);
      r = Math.max(r, rank[m] + 1); sum += column[m]; n += 1;
    }
    rank[k] = r;
    const row = (rows[r] = rows[r] || new Set()), wish = n ? Math.round(sum / n) : row.size;
    let at = wish;
    for (let d = 0; row.has(at); d++) at = wish + (d % 2 ? -1 : 1) * Math.ceil((d + 1) / 2);
    row.add(at); column[k] = at;
    for (const name of s.writes) maker.set(name, k);
  });
  return { rank, column, edges };
}
function graph(part) {
  const { rank, column, edges } = layout(part), BW = 190, BH = 34, GX = 30, GY = 40;
  const least = Math.min(0, ...column), px = (k) => (column[k] - least) * (BW + GX), py = (k) => rank[k] * (BH + GY);
  const width = Math.max(...part.steps.map((_, k) => px(k) + BW), 400), height = Math.max(...part.steps.map((_, k) => py(k) + BH), 200);
  const svg = draw("svg", { role: "img" });
  for (const [a, b, name] of edges) {
    const t = part.tensors[name], x1 = px(a) + BW / 2, y1 = py(a) + BH, x2 = px(b) + BW / 2, y2 = py(b), my = (y1 + y2) / 2;
    const w = 1 + Math.log10(1 + (t ? t.bytes : 0) / 1e4);
    svg.append(titled(draw("path", { class: "edge", "stroke-width": w, d: `M${x1} ${y1}C${x1} ${my} ${x2} ${my} ${x2} ${y2}` }), t ? t.label + "\n" + t.layout + "\n" + amount(t.bytes, "B") : name));
  }
  part.steps.forEach((s, k) => {
    const known = byId.get(s.id), g = draw("g", { class: "node", "data-id": s.id, transform: `translate(${px(k)},${py(k)})` });
    g.append(draw("rect", { class: s.kind, width: BW, height: BH }));
    const text = known ? known.what.replace("aten.", "") : s.name, second = known ? known.where : "";
    g.append(draw("text", { x: 8, y: 14 }, text.length > 26 ? text.slice(0, 25) + "…" : text));
    g.append(draw("text", { x: 8, y: 28, "fill-opacity": 0.85 }, (us(s.us) + " " + second).slice(0, 27)));
    svg.append(titled(g, s.name + "\n" + second + "\n" + us(s.us)));
  });
  const box = $("graph"), aspect = Math.max(0.2, box.clientWidth / 544), fitted = Math.max(width + 40, 900);
  let view = { x: (width - fitted) / 2, y: -20, w: fitted };
  const apply = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.w / aspect}`);
  const zoom = (f, cx = 0.5, cy = 0.5) => {
    const w = Math.min(20 * Math.max(width, height), Math.max(150, view.w * f));
    view = { x: view.x + (view.w - w) * cx, y: view.y + (view.w - w) / aspect * cy, w };
    apply();
  };
  const fit = () => { const w = Math.max(width + 40, (height + 40) * aspect); view = { x: (width - w) / 2, y: -20, w }; apply(); };
  svg.addEventListener("wheel", (e) => {
    e.preventDefault();
    const r = svg.getBoundingClientRect();
    zoom(e.deltaY > 0 ? 1.2 : 1 / 1.2, (e.clientX - r.left) / r.width, (e.clientY - r.top) / r.height);
  }, { passive: false });
  let from = null, moved = false;
  svg.addEventListener("pointerdown", (e) => { from = { x: e.clientX, y: e.clientY, view }; moved = false; });
  svg.addEventListener("pointermove", (e) => {
    if (!from) return;
    const s = view.w / svg.clientWidth, dx = e.clientX - from.x, dy = e.clientY - from.y;
    if (Math.abs(dx) + Math.abs(dy) > 3) moved = true;
    view = { ...view, x: from.view.x - dx * s, y: from.view.y - dy * s };
    apply();
  });
  addEventListener("pointerup", () => { from = null; });
  svg.addEventListener("click", (e) => { const n = e.target.closest(".node"); if (n && !moved && byId.has(n.dataset.id)) show(n.dataset.id); });
  box.onkeydown = (e) => {
    const step = view.w / 10, m = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (m) { view = { ...view, x: view.x + m[0] * step, y: view.y + m[1] * step }; apply(); e.preventDefault(); }
    else if (e.key === "+") zoom(1 / 1.25); else if (e.key === "-") zoom(1.25); else if (e.key === "0") { fit(); e.stopPropagation(); }
  };
  $("graphsearch").oninput = () => {
    const word = $("graphsearch").value.toLowerCase();
    let first = null;
    for (const n of svg.querySelectorAll(".node")) {
      const s = byId.get(n.dataset.id), hit = word && s && s.words.includes(word);
      n.classList.toggle("found", Boolean(hit));
      if (hit && first === null) first = part.steps.findIndex((x) => x.id === n.dataset.id);
    }
    if (first !== null) { view = { x: px(first) + BW / 2 - 450, y: py(first) - 150, w: 900 }; apply(); }
  };
  apply();
  box.replaceChildren(svg);
}
function plots() {
  const part = data.parts[+$("plotpart").value];
  if (!part) return;
  graph(part); timeline(part); roofline(part);
}
$("plotpart").addEventListener("input", plots);

// What is not on the screen is drawn when it comes near it.
const near = new IntersectionObserver((entries) => {
  for (const e of entries) if (e.isIntersecting) {
    near.unobserve(e.target);
    if (e.target.dataset.plot) memory(e.target); else plots();
  }
}, { rootMargin: "600px" });
for (const box of document.querySelectorAll("[data-plot]")) near.observe(box);
near.observe($("plots"));

// --------------------------------------------------------------------------------- keys and theme
function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
}
$("theme").addEventListener("click", theme);
$("help").addEventListener("click", () => $("keys").showModal());
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) { if (e.key === "Escape") e.target.blur(); return; }
  const links = document.querySelectorAll("nav a"), n = Number(e.key);
  if (n >= 1 && n <= links.length && !e.target.closest("#graph")) { document.querySelector(links[n - 1].getAttribute("href")).scrollIntoView(); return; }
  if (e.key === "j" || e.key === "k") { go(here + (e.key === "j" ? 1 : -1)); e.preventDefault(); }
  else if (e.key === "Enter" && e.target.matches("tr.row")) toggle(e.target);
  else if (e.key === "/") { $("search").focus(); e.preventDefault(); }
  else if (e.key === "t") theme();
  else if (e.key === "?") $("keys").showModal();
});
fill();
// report.html#step=forward0.3 opens that step.
function linked() {
  const id = decodeURIComponent(location.hash).match(/^#step=(.+)$/);
  if (id && byId.has(id[1])) show(id[1]);
}
addEventListener("hashchange", linked);
linked();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
