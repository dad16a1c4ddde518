"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- numbers as text ---------------------------------------------------------------------------

function time(us) {
  for (const [unit, size] of [["s", 1e6], ["ms", 1e3], ["us", 1]]) {
    if (Math.abs(us) >= size) {
      const value = us / size;
      return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " " + unit;
    }
  }
  return us ? (us * 1e3).toFixed(0) + " ns" : "0";
}
function bytes(n) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (n >= size) return (n / size).toFixed(1) + " " + unit;
  }
  return n + " B";
}
const count = (n) => n.toLocaleString("en");
const percent = (share) => Math.round(share * 100) + " %";

// ---- elements ----------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") found.onclick = value;
    else found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}
function share(value, of, words) {
  const part = of > 0 ? Math.min(1, value / of) : 0;
  const bar = make("i");
  bar.style.width = part * 100 + "%";
  return make("span", { class: "share" }, bar, make("span", {}, words ?? percent(part)));
}
function sizes(pairs) {
  const most = Math.max(1, ...pairs.map(([, n]) => n));
  const picture = make("span", { class: "sizes" });
  for (const [rank, n] of pairs.slice(0, 32)) {
    const bar = make("i", { title: `rank ${rank}: ${bytes(n)}` });
    bar.style.height = (n / most) * 100 + "%";
    picture.append(bar);
  }
  return picture;
}
function table(id, title, about, columns, rows) {
  if (!rows.length) return;
  const head = make("tr", {}, ...columns.map((name) =>
    make("th", { class: name.startsWith(">") ? "n" : "" }, name.replace(/^>/, ""))));
  const body = rows.map(({ kind = "", cells, bad = [] }) => make("tr", { class: kind },
    ...cells.map((cell, at) => make("td", {
      class: (columns[at].startsWith(">") ? "n" : "") + (bad.includes(at) ? " bad" : ""),
    }, cell))));
  $("tables").append(make("section", { class: "table", id },
    make("h2", {}, title), make("p", {}, about), make("table", {}, head, ...body)));
}
const line = (of) => make("a", { title: of.site, onclick: () => search(of.line) }, of.line);
const side = (of) => (of.call.endsWith(" backward") ? "backward" : "forward");

// ---- text and tables ---------------------------------------------------------------------------

$("summary").textContent = `${data.path}: ${data.summary}`;
for (const [level, sentence] of data.headlines) {
  $("headlines").append(make("p", { class: level }, sentence));
}
if (!data.headlines.length) {
  $("headlines").append(make("p", { class: "good" }, "No rank is late often, no call differs, none hangs."));
}
const [shown, total] = data.shown;
if (shown < total) {
  $("sampled").textContent = `The timeline shows ${count(shown)} of ${count(total)} calls: the last, ` +
    "the longest, and runs of others at even distances. The tables count all of them.";
}

if (data.hangs || data.last.some((one) => one.error)) {
  table("last", "The last call of each rank", "A call that has not ended waits for a rank that has not come.",
    ["rank", "call", "line", ">number", ">began", "state"],
    data.last.map((one) => ({
      kind: side(one), bad: one.ended === null || one.error ? [5] : [],
      cells: [String(one.rank), goTo(one, one.call), line(one), count(one.number), time(one.at),
        one.ended === null ? "has not ended" : one.error.split("\n")[0] || `ended at ${time(one.ended)}`],
    })));
}
for (const one of data.mismatches) {
  table("mismatch", `Call ${count(one.number)} of ${one.group} differs`,
    "What each rank did. Later calls of this group are not compared.", ["rank", "call"],
    one.ranks.map(([rank, words]) => ({ cells: [String(rank), words], bad: one.odd.includes(rank) ? [0, 1] : [] })));
}
const caused = Math.max(0, ...data.ranks.map((one) => one.caused));
table("ranks", "Ranks", "A call waits for the last rank to start it. Late: last by more than 100 us.",
  ["rank", "host", ">calls", ">in calls", ">of that waiting", ">last to start", ">late", ">by (mean)", ">others waited for it"],
  data.ranks.map((one) => ({
    bad: one.slow ? [6, 7] : [],
    cells: [String(one.rank), one.host, count(one.calls), time(one.in), share(one.waits, one.in),
      percent(one.last), percent(one.late), one.late ? time(one.by) : "", share(one.caused, caused, time(one.caused))],
  })));
const inCalls = Math.max(0, ...data.lines.map((one) => one.in));
table("lines", "Calls by line of the program", "Time and bytes of all ranks together; a call: one, without waiting, and what allgrad plan says of it; " +
  "skew: the largest rank's bytes by the mean.",
  ["call", "line", "dtype", ">calls a rank", ">bytes", ">in calls", ">of that waiting", "algorithm", ">a call", ">plan", ">skew", "sizes by rank"],
  data.lines.map((one) => ({
    kind: side(one), bad: one.skew >= 1.5 ? [10] : [],
    cells: [one.call, line(one), one.dtype, count(one.calls), bytes(one.bytes), share(one.in, inCalls, time(one.in)),
      share(one.waits, one.in), Object.keys(one.algorithm).join(", "), time(one.moving), one.plan, one.skew.toFixed(2), sizes(one.sizes)],
  })));
table("slowest", "The slowest calls", "Time of the rank that was in the call longest, and how much of it was waiting.",
  ["call", "line", ">number", ">at", ">took", ">waited", "for", "sizes by rank"],
  data.slowest.map((one) => ({
    kind: side(one),
    cells: [goTo(one, one.call), line(one), count(one.number), time(one.at), time(one.took),
      share(one.waited, one.took, time(one.waited)), one.waited ? `rank ${one.for}` : "", sizes(one.sizes)],
  })));

function goTo(one, words) {
  const took = one.took ?? Math.max(1000, data.span - one.at);
  return make("a", { title: "Show it in the timeline", onclick: () => {
    chosen = `${data.groups.indexOf(one.group)} ${one.number}`;
    show(one.at - took * 0.5, one.at + took * 1.5);
    $("timeline").scrollIntoView({ block: "start" });
  } }, words);
}

// ---- timeline ----------------------------------------------------------------------------------

const LEFT = 92, AXIS = 22;
const lanes = data.lanes;
const laneHeight = Math.max(6, Math.min(26, Math.floor(560 / Math.max(1, lanes.length))));
const whole = [0, Math.max(1, data.span)];
let view = [...whole], wanted = "", chosen = null, under = null, colors = {}, found = [], overview = null;
const matching = new Set(), byCall = new Map();
for (const lane of lanes) {
  lane.bad = new Set(lane.failed);
  // Calls may overlap in a lane; the longest one bounds how far back to look for what is in view.
  lane.longest = lane.took.reduce((most, took) => Math.max(most, took < 0 ? data.span : took), 0);
  lane.number.forEach((number, at) => {
    const key = `${lane.group[at]} ${number}`;
    if (!byCall.has(key)) byCall.set(key, []);
    byCall.get(key).push([lane, at]);
  });
}
const end = (lane, at) => (lane.took[at] < 0 ? data.span : lane.start[at] + lane.took[at]);

function firstAfter(starts, when) {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] < when) low = middle + 1; else high = middle;
  }
  return low;
}

function show(from, to) {
  const least = Math.min(1, whole[1]);
  const length = Math.max(least, Math.min(whole[1], to - from));
  const start = Math.max(0, Math.min(whole[1] - length, from));
  view = [start, start + length];
  draw();
}
function zoom(factor, around = (view[0] + view[1]) / 2) {
  show(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
}

function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const to = canvas.getContext("2d");
  to.setTransform(scale, 0, 0, scale, 0, 0);
  to.clearRect(0, 0, width, height);
  to.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  to.textBaseline = "middle";
  return [to, width];
}

function drawLane(to, lane, top, height, from, until, left, width) {
  const perPixel = (until - from) / width;
  let drawnTo = -1, drawnRank = -1;
  for (let at = firstAfter(lane.start, from - lane.longest); at < lane.start.length; at++) {
    const start = lane.start[at];
    if (start > until) break;
    const stop = end(lane, at);
    if (stop < from) continue;
    const kind = data.kinds[lane.kind[at]];
    const bad = lane.took[at] < 0 || lane.bad.has(at);
    const seen = !wanted || matching.has(lane.kind[at]);
    const importance = bad ? 3 : seen && wanted ? 2 : 1;
    const x = Math.max(left, left + (start - from) / perPixel);
    const right = Math.min(left + width, left + (stop - from) / perPixel);
    if (right <= drawnTo && importance <= drawnRank) continue; // hidden behind what is there
    drawnTo = Math.max(right, x + 1);
    drawnRank = importance;
    const waited = bad ? 0 : lane.waits[at];
    const middle = Math.min(right, left + (start + waited - from) / perPixel);
    to.globalAlpha = seen ? 1 : 0.13;
    const color = bad ? colors.bad : kind.backward ? colors.backward : colors.forward;
    if (middle > x) {
      to.fillStyle = kind.backward ? colors.backwardWait : colors.forwardWait;
      to.fillRect(x, top, Math.max(1, middle - x), height);
    }
    to.fillStyle = color;
    if (right > middle || middle <= x) {
      to.fillRect(Math.max(x, middle), top, Math.max(1, right - Math.max(x, middle)), height);
    }
    if (right - x > 60 && height > 14) {
      to.save();
      to.beginPath();
      to.rect(x, top, right - x - 4, height);
      to.clip();
      to.fillStyle = middle - x > 30 ? colors.ink : colors.card;
      to.fillText(kind.call, x + 6, top + height / 2 + 1);
      to.restore();
    }
    const key = `${lane.group[at]} ${lane.number[at]}`;
    if (key === chosen && height > 4) {
      to.globalAlpha = 1;
      to.strokeStyle = colors.focus;
      to.lineWidth = 1.5;
      to.strokeRect(x - 0.75, top - 0.75, Math.max(3, right - x) + 1.5, height + 1.5);
    }
  }
  to.globalAlpha = 1;
}

function drawArrows(to, width) {
  const ends = byCall.get(chosen);
  if (!ends) return;
  const x = (when) => LEFT + ((when - view[0]) / (view[1] - view[0])) * width;
  const y = (lane) => AXIS + (lanes.indexOf(lane) + 0.5) * laneHeight;
  const cause = ends.find(([lane, at]) => lane.rank === lane.for[at]);
  if (!cause) return;
  const when = x(cause[0].start[cause[1]]);
  if (when < LEFT || when > LEFT + width) return;
  to.strokeStyle = colors.focus;
  to.lineWidth = 1;
  to.setLineDash([3, 3]);
  const rows = ends.map(([lane]) => y(lane));
  to.beginPath();
  to.moveTo(when, Math.min(...rows));
  to.lineTo(when, Math.max(...rows));
  to.stroke();
  to.setLineDash([]);
}

function drawAxis(to, width, height) {
  const length = view[1] - view[0];
  const step = 10 ** Math.floor(Math.log10(length / (width / 110)));
  const nice = [1, 2, 5, 10].map((n) => n * step).find((n) => (n / length) * width > 90) ?? step * 20;
  to.fillStyle = colors.dim;
  to.strokeStyle = colors.rule;
  to.lineWidth = 1;
  const unit = nice >= 1e6 ? [1e6, "s"] : nice >= 1e3 ? [1e3, "ms"] : [1, "us"];
  const digits = Math.max(0, -Math.floor(Math.log10(nice / unit[0]) + 1e-9));
  for (let when = Math.ceil(view[0] / nice) * nice; when <= view[1]; when += nice) {
    const x = Math.round(LEFT + ((when - view[0]) / length) * width) + 0.5;
    to.beginPath();
    to.moveTo(x, AXIS - 4);
    to.lineTo(x, height);
    to.stroke();
    if (x < LEFT + width - 50) to.fillText((when / unit[0]).toFixed(digits) + " " + unit[1], x + 3, 8);
  }
}

function drawMap() {
  const row = Math.max(1, Math.min(4, Math.floor(60 / Math.max(1, lanes.length))));
  const height = row * lanes.length + 4;
  const [to, full] = prepare($("map"), height);
  const width = full - LEFT;
  if (!overview) { // all calls, drawn once: zooming only moves the frame
    to.fillStyle = colors.lane;
    to.fillRect(LEFT, 0, width, height);
    lanes.forEach((lane, at) => drawLane(to, lane, 2 + at * row, Math.max(1, row - 1), ...whole, LEFT, width));
    overview = document.createElement("canvas");
    [overview.width, overview.height] = [$("map").width, $("map").height];
    overview.getContext("2d").drawImage($("map"), 0, 0);
  } else to.drawImage(overview, 0, 0, full, height);
  const scale = width / (whole[1] - whole[0]);
  const from = LEFT + view[0] * scale, to_ = LEFT + view[1] * scale;
  to.fillStyle = colors.ground;
  to.globalAlpha = 0.72;
  to.fillRect(LEFT, 0, from - LEFT, height);
  to.fillRect(to_, 0, full - to_, height);
  to.globalAlpha = 1;
  to.strokeStyle = colors.focus;
  to.strokeRect(from + 0.5, 0.5, Math.max(2, to_ - from - 1), height - 1);
}

function draw() {
  const height = AXIS + lanes.length * laneHeight;
  const [to, full] = prepare($("lanes"), height);
  const width = full - LEFT;
  drawAxis(to, width, height);
  const gap = laneHeight > 12 ? 4 : 1;
  lanes.forEach((lane, at) => {
    const top = AXIS + at * laneHeight;
    to.fillStyle = colors.ink;
    if (laneHeight > 9 || at % Math.ceil(14 / laneHeight) === 0) {
      const again = at > 0 && lanes[at - 1].rank === lane.rank;
      to.fillStyle = again ? colors.dim : colors.ink;
      const thread = lane.thread.startsWith("allgrad") ? "async" : lane.thread.slice(0, 10);
      to.fillText(again ? "  " + thread : `rank ${lane.rank}`, 0, top + laneHeight / 2);
    }
    drawLane(to, lane, top + gap / 2, laneHeight - gap, view[0], view[1], LEFT, width);
  });
  drawArrows(to, width);
  drawMap();
}

// ---- what the mouse and the keys do ------------------------------------------------------------

function at(event) {
  const box = $("lanes").getBoundingClientRect();
  const width = box.width - LEFT;
  const when = view[0] + ((event.clientX - box.left - LEFT) / width) * (view[1] - view[0]);
  const lane = lanes[Math.floor((event.clientY - box.top - AXIS) / laneHeight)];
  const inside = event.clientX - box.left >= LEFT;
  return { when, lane: inside ? lane : undefined, perPixel: (view[1] - view[0]) / width };
}
function callAt({ when, lane, perPixel }) {
  if (!lane) return null;
  let best = null, distance = 3 * perPixel;
  for (let one = firstAfter(lane.start, when - lane.longest); one < lane.start.length; one++) {
    if (lane.start[one] > when + distance) break;
    const away = Math.max(lane.start[one] - when, when - end(lane, one), 0);
    if (away <= distance && (best === null || away < distance || away === 0)) {
      best = one;
      distance = Math.max(away, 0);
    }
  }
  return best === null ? null : [lane, best];
}
function describe([lane, one]) {
  const kind = data.kinds[lane.kind[one]];
  const rows = [
    ["rank", String(lane.rank)],
    ["call", `${count(lane.number[one])} of ${data.groups[lane.group[one]]}`],
    ["line", kind.site],
    ["operation", `${kind.operation} by ${kind.algorithm}, ${kind.dtype}`],
    ["bytes", `${bytes(lane.sent[one])} in, ${bytes(lane.received[one])} out`],
    ["began", time(lane.start[one])],
    ["took", lane.took[one] < 0 ? "has not ended" : time(lane.took[one])],
  ];
  if (lane.waits[one] > 0) rows.push(["waited", `${time(lane.waits[one])} for rank ${lane.for[one]}`]);
  if (lane.bad.has(one)) rows.push(["ended", "with an error"]);
  const list = make("dl");
  for (const [name, value] of rows) list.append(make("dt", {}, name), make("dd", {}, value));
  return [make("b", {}, kind.call), list];
}

const canvas = $("lanes");
let drag = null;
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const by = ((view[1] - view[0]) * event.deltaX) / 1000;
    show(view[0] + by, view[1] + by);
  } else zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), at(event).when);
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.clientX, view: [...view], moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", (event) => {
  canvas.classList.remove("moving");
  if (drag && !drag.moved) {
    const one = callAt(at(event));
    chosen = one ? `${one[0].group[one[1]]} ${one[0].number[one[1]]}` : null;
    draw();
  }
  drag = null;
});
canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    const by = (drag.x - event.clientX) * at(event).perPixel;
    drag.moved ||= Math.abs(drag.x - event.clientX) > 3;
    if (drag.moved) {
      canvas.classList.add("moving");
      show(drag.view[0] + by, drag.view[1] + by);
    }
    return;
  }
  under = callAt(at(event));
  const box = $("hover");
  box.hidden = !under;
  if (!under) return;
  box.replaceChildren(...describe(under));
  box.style.left = Math.min(event.clientX + 14, window.innerWidth - box.offsetWidth - 12) + "px";
  box.style.top = Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 12) + "px";
});
canvas.addEventListener("pointerleave", () => { $("hover").hidden = true; });
canvas.addEventListener("dblclick", (event) => zoom(0.25, at(event).when));
canvas.addEventListener("keydown", (event) => {
  const by = (view[1] - view[0]) / 5;
  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => show(...whole),
    ArrowLeft: () => show(view[0] - by, view[1] - by), ArrowRight: () => show(view[0] + by, view[1] + by),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
$("map").addEventListener("pointerdown", (event) => {
  const box = $("map").getBoundingClientRect(), half = (view[1] - view[0]) / 2;
  const when = ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * whole[1];
  show(when - half, when + half);
});
$("in").onclick = () => zoom(0.5);
$("out").onclick = () => zoom(2);
$("all").onclick = () => show(...whole);

// ---- search ------------------------------------------------------------------------------------

function search(words) {
  $("search").value = words;
  wanted = words.trim().toLowerCase();
  matching.clear();
  found = [];
  data.kinds.forEach((kind, number) => {
    const text = [kind.call, kind.operation, kind.algorithm, kind.site, kind.dtype].join(" ").toLowerCase();
    if (wanted && text.includes(wanted)) matching.add(number);
  });
  for (const lane of lanes) {
    lane.kind.forEach((kind, one) => { if (matching.has(kind)) found.push([lane, one]); });
  }
  found.sort((a, b) => a[0].start[a[1]] - b[0].start[b[1]]);
  $("matches").textContent = wanted ? `${count(found.length)} calls` : "";
  overview = null;
  draw();
}
let next = 0;
$("search").addEventListener("input", () => { next = 0; search($("search").value); });
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !found.length) return;
  const [lane, one] = found[next++ % found.length];
  const around = Math.max(200, 4 * (end(lane, one) - lane.start[one]));
  chosen = `${lane.group[one]} ${lane.number[one]}`;
  show(lane.start[one] - around / 2, end(lane, one) + around / 2);
});

// ---- light and dark ----------------------------------------------------------------------------

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "card", "ink", "dim", "rule", "forward", "backward", "bad", "focus", "lane"]) {
    colors[name] = style.getPropertyValue("--" + name).trim();
  }
  colors.forwardWait = style.getPropertyValue("--forward-wait").trim();
  colors.backwardWait = style.getPropertyValue("--backward-wait").trim();
  overview = null;
  draw();
}
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", (event) => paint(event.matches ? "dark" : "light"));
$("theme").onclick = () => paint(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
window.addEventListener("resize", () => { overview = null; draw(); });
paint(prefersDark.matches ? "dark" : "light");
