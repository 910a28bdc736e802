// The dashboard. Each second the gateway sends its whole state; what is drawn is a function of the last one.

import { histogram, lines, short, span, stacks } from "/assets/charts.js";

const HISTORY = 900;      // samples kept, one a second
const ROW_PIXELS = 30;    // as style.css has it
const STALE_MS = 5000;    // without news for so long the page says so
const MOST_CELLS = 192;   // an engine with more slots is drawn as one bar
const SURE_MS = 4000;     // how long a button waits for its second click

const $ = (id) => document.getElementById(id);
const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };

let state = null, history = [], heard = 0, pending = false;

// ------------------------------------------------------------------------------------------------ the link

function listen() {
  const source = new EventSource("/admin/events");
  source.addEventListener("history", (event) => { history = JSON.parse(event.data); });
  source.addEventListener("state", (event) => {
    state = JSON.parse(event.data);
    heard = performance.now();
    if (state.sample && state.sample[0] !== history.at(-1)?.[0]) history.push(state.sample);
    if (history.length > HISTORY) history.splice(0, history.length - HISTORY);
    schedule();
  });
  source.onerror = () => {
    link();
    if (source.readyState === EventSource.CLOSED) { // refused: the login is over, or there are too many pages
      fetch("/admin/ledger").then((answer) => answer.status === 401 ? location.assign("/login") : setTimeout(listen, 3000),
        () => setTimeout(listen, 3000));
    }
  };
}

function link() {
  const fresh = state && performance.now() - heard < STALE_MS;
  const [word, mood] = !state ? ["connecting", "wait"] : !fresh ? ["no news: is the gateway there?", "bad"]
    : state.draining ? ["draining", "wait"] : ["live", "good"];
  set($("link"), word);
  $("link").dataset.state = mood;
  document.body.classList.toggle("stale", !fresh);
}

// A page that isn't looked at draws nothing; one that is draws at most once a frame.
function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

// ------------------------------------------------------------------------------------------------ what is drawn

function draw() {
  link();
  if (!state) return;
  $("leave").hidden = !state.login;
  now();
  engines();
  charts();
  tenants();
  requests();
}

function now() {
  const phases = {};
  for (const row of state.requests) phases[row[4]] = (phases[row[4]] ?? 0) + 1;
  const slots = Object.values(state.engines).map((engine) => engine.slots);
  const sum = (key) => slots.reduce((total, each) => total + each[key], 0);
  const saved = Object.values(state.saved);
  set($("about"), `version ${state.version}, up ${span(state.uptime_seconds)}`);
  set($("running"), String(sum("running")));
  set($("running-of"), `of ${sum("slots")} slots; ${sum("reclaiming")} reclaiming, ${sum("ghosts")} ghosts`);
  set($("waiting"), String(state.queue.waiting));
  const tenants = Object.keys(state.queue.tenants).filter(Boolean).length;
  set($("waiting-of"), `of ${state.queue.most} at most${tenants ? `, of ${tenants} tenant${tenants > 1 ? "s" : ""}` : ""}`);
  set($("rate"), short(state.sample ? state.sample[1] : null));
  set($("made"), `${short(state.tokens.completion ?? 0)} made for ended requests`);
  set($("ttft-p50"), span(state.ttft.p50));
  set($("ttft-more"), `p95 ${span(state.ttft.p95)}, p99 ${span(state.ttft.p99)}`);
  set($("teardown-p99"), span(state.teardown.p99));
  set($("teardown-more"), `p50 ${span(state.teardown.p50)}, of the last that left`);
  set($("saved"), span(saved.reduce((total, each) => total + each.seconds, 0)));
  set($("saved-of"), `${short(saved.reduce((total, each) => total + each.tokens, 0))} tokens not made, an estimate`);
  const sick = Object.entries(state.engines).filter(([, engine]) => engine.state !== "healthy" && !engine.retired);
  set($("notice"), sick.map(([name, engine]) => `${name} is ${engine.state}: ${engine.reason ?? ""}`).join(" · "));
  $("notice").hidden = !sick.length;
}

function engines() {
  const box = $("engines");
  const wanted = Object.keys(state.engines);
  for (const card of [...box.children]) if (!wanted.includes(card.dataset.name)) card.remove();
  wanted.forEach((name, index) => {
    const card = [...box.children].find((each) => each.dataset.name === name) ?? newEngine(name);
    if (box.children[index] !== card) box.insertBefore(card, box.children[index] ?? null);
    fillEngine(card, state.engines[name]);
  });
}

function newEngine(name) {
  const card = document.createElement("article");
  card.className = "engine";
  card.dataset.name = name;
  card.innerHTML = `<header><h3></h3><span class="pill"></span><span class="actions"><button type="button"></button></span></header>
    <div class="slots"></div><p class="quiet counts"></p><p class="quiet more"></p>`;
  set(card.querySelector("h3"), name);
  twice(card.querySelector("button"), () => {
    const verb = state.engines[name].drained ? "resume" : "drain";
    return tell(`/admin/engines/${encodeURIComponent(name)}/${verb}`, "POST");
  });
  return card;
}

function fillEngine(card, engine) {
  const pill = card.querySelector(".pill"), button = card.querySelector("button"), slots = engine.slots;
  const word = engine.retired ? "leaving" : engine.drained ? "kept free" : engine.resting_seconds > 0 ? "resting" : engine.state;
  set(pill, word);
  pill.dataset.state = { healthy: "good", ejected: "bad" }[word] ?? "wait";
  if (!button.classList.contains("sure")) set(button, engine.drained ? "Resume" : "Drain");
  button.disabled = engine.retired;
  drawSlots(card.querySelector(".slots"), slots);
  set(card.querySelector(".counts"), `${slots.running} running, ${slots.reclaiming} reclaiming, ${slots.ghosts} ghosts, `
    + `${slots.free} free of ${slots.slots}${slots.balanced ? "" : "; THE BOOKS DON'T AGREE"}`);
  const says = engine.says ? `says ${engine.says.running} running, ${engine.says.waiting} waiting` : "";
  const sick = engine.state === "healthy" ? "" : `${engine.reason ?? ""}${engine.backoff_seconds ? `; tried again in ${span(engine.backoff_seconds)}` : ""}`;
  set(card.querySelector(".more"), [engine.kind, engine.models.join(", "), says, sick,
    engine.ejections ? `ejected ${engine.ejections} times` : ""].filter(Boolean).join(" · "));
}

function drawSlots(box, slots) {
  const key = JSON.stringify(slots);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren();
  const kinds = [["running", slots.running], ["reclaiming", slots.reclaiming], ["ghost", slots.ghosts], ["", slots.free]];
  box.className = slots.slots > MOST_CELLS ? "slots meter" : "slots cells";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${slots.running} running, ${slots.reclaiming} reclaiming, ${slots.ghosts} ghosts, ${slots.free} free`);
  for (const [kind, count] of kinds) {
    if (slots.slots > MOST_CELLS) {
      const part = document.createElement("i");
      part.className = kind;
      part.style.width = `${100 * count / slots.slots}%`;
      part.title = `${count} ${kind || "free"}`;
      box.append(part);
      continue;
    }
    for (let index = 0; index < count; index++) {
      const cell = document.createElement("i");
      cell.className = `cell ${kind}`;
      cell.title = kind || "free";
      box.append(cell);
    }
  }
}

function charts() {
  const times = history.map((sample) => sample[0]);
  const seconds = Math.max(60, Math.min(HISTORY, (times.at(-1) ?? 0) - (times[0] ?? 0)));
  const tokens = history.map((sample) => sample[1]), waiting = history.map((sample) => sample[2]), running = history.map((sample) => sample[3]);
  lines($("chart-tokens"), times, [{ name: "tokens/s", colour: "var(--running)", values: tokens }], seconds, `Tokens a second, now ${short(tokens.at(-1))}`);
  lines($("chart-load"), times, [{ name: "slots held", colour: "var(--running)", values: running },
    { name: "waiting", colour: "var(--reclaiming)", values: waiting }], seconds, `Slots held ${running.at(-1) ?? 0}, waiting ${waiting.at(-1) ?? 0}`);
  const minutes = Array.from({ length: HISTORY / 60 }, () => ({}));
  const end = times.at(-1) ?? 0;
  for (const sample of history) {
    const minute = minutes[Math.floor((end - sample[0]) / 60)] ?? {};
    for (const [outcome, count] of Object.entries(sample[4])) minute[outcome] = (minute[outcome] ?? 0) + count;
  }
  const totals = Object.entries(state.outcomes).map(([outcome, count]) => `${outcome} ${count}`).join(", ");
  stacks($("chart-outcomes"), minutes.reverse(), `Ended since the start: ${totals || "none"}`);
  for (const name of ["ttft", "teardown"]) {
    const { buckets, p50, p95, p99 } = state[name];
    histogram($(`chart-${name}`), buckets, { p50, p95, p99 }, `p50 ${span(p50)}, p95 ${span(p95)}, p99 ${span(p99)}; ${buckets.at(-1)[1]} in all`);
  }
}

function tenants() {
  const rows = Object.entries(state.queue.tenants).sort(([, one], [, other]) => other.waiting - one.waiting);
  const body = $("tenants").tBodies[0];
  fill(body, rows.length ? rows.map(([name, each]) => [name || "everybody", each.waiting, each.held, span(each.longest_seconds)])
    : [["Nobody waits.", "", "", ""]], ["cut", "number", "number", "number"]);
}

// Of thousands of requests only those in sight are in the page.
function requests() {
  const word = $("filter").value.trim().toLowerCase();
  const all = state.requests;
  const rows = word ? all.filter((row) => row.slice(0, 5).some((cell) => String(cell ?? "").toLowerCase().includes(word))) : all;
  set($("live"), word ? `${rows.length} of ${all.length}` : String(all.length));
  const box = $("window"), body = $("requests").tBodies[0];
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_PIXELS) - 5);
  const count = Math.ceil((box.clientHeight || 430) / ROW_PIXELS) + 10;
  const shown = rows.slice(first, first + count);
  const space = (height) => { const row = document.createElement("tr"); row.className = "space"; row.innerHTML = "<td colspan=10></td>";
    row.firstChild.style.height = `${height}px`; return row; };
  const kept = new Map([...body.rows].filter((row) => row.dataset.id).map((row) => [row.dataset.id, row]));
  const wanted = shown.map((cells) => fillRequest(kept.get(cells[0]) ?? newRequest(cells[0]), cells));
  const focus = document.activeElement;
  if (!rows.length) {
    const row = document.createElement("tr");
    row.innerHTML = "<td colspan=10 class=empty></td>";
    row.firstChild.textContent = word ? "None of them fits the filter." : "No requests at the moment.";
    wanted.push(row);
  }
  body.replaceChildren(space(first * ROW_PIXELS), ...wanted, space((rows.length - first - shown.length) * ROW_PIXELS));
  if (focus && focus !== document.activeElement && body.contains(focus)) focus.focus({ preventScroll: true });
}

function newRequest(id) {
  const row = document.createElement("tr");
  row.dataset.id = id;
  for (const kind of ["id", "cut", "cut", "cut", "", "number", "number", "number", "number", "number"]) row.insertCell().className = kind;
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel request ${id}`);
  set(button, "Cancel");
  twice(button, () => tell(`/admin/requests/${id}`, "DELETE"));
  row.cells[9].append(button);
  return row;
}

function fillRequest(row, [id, tenant, model, engine, phase, age, events, bytes, spooled]) {
  [id, tenant ?? "–", model ?? "–", engine ?? "–", phase, span(age), short(events), short(bytes), short(spooled)]
    .forEach((text, index) => set(row.cells[index], text));
  row.cells[2].title = model ?? "";
  return row;
}

function fill(body, rows, kinds) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    cells.forEach((text, column) => {
      const cell = row.cells[column] ?? row.insertCell();
      cell.className = kinds[column];
      set(cell, String(text));
    });
  });
}

// ------------------------------------------------------------------------------------------------ what can be done

// What ends somebody's answer takes two clicks.
function twice(button, act) {
  let word = "", timer = 0;
  const calm = () => { clearTimeout(timer); button.classList.remove("sure"); set(button, word); };
  button.addEventListener("click", async () => {
    if (!button.classList.contains("sure")) {
      word = button.textContent;
      button.classList.add("sure");
      set(button, "Sure?");
      timer = setTimeout(calm, SURE_MS);
      return;
    }
    calm();
    button.disabled = true;
    await act();
    button.disabled = false;
  });
}

async function tell(path, method) {
  try {
    const answer = await fetch(path, { method });
    if (answer.status === 401) location.assign("/login");
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `${answer.status}`);
  } catch (error) {
    set($("notice"), `${method} ${path}: ${error.message}`);
    $("notice").hidden = false;
  }
}

const THEMES = ["system", "light", "dark"];

function theme(next) {
  const was = localStorage.getItem("theme") ?? "system";
  const is = next ? THEMES[(THEMES.indexOf(was) + 1) % THEMES.length] : was;
  localStorage.setItem("theme", is);
  if (is === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = is;
  set($("theme"), `Theme: ${is}`);
}

$("theme").addEventListener("click", () => theme(true));
$("filter").addEventListener("input", schedule);
$("window").addEventListener("scroll", schedule, { passive: true });
addEventListener("resize", schedule);
addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing) { event.target.value = ""; event.target.blur(); schedule(); }
  if (typing) return;
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  if (event.key === "t") theme(true);
});
setInterval(link, 1000);
theme(false);
listen();
