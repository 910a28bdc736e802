// Small charts, drawn as SVG: lines over time, stacked bars for minutes, and histograms.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 460, HEIGHT = 150, LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;

export const OUTCOMES = {
  completed: "var(--good)", client_gone: "var(--running)", client_stalled: "#0891b2", cancelled: "#64748b", drained: "#94a3b8",
  engine_timeout: "var(--ghost)", engine_failed: "var(--bad)", shed: "var(--reclaiming)", rejected: "#a16207",
};

function make(name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function nice(most) { // the next 1, 2 or 5 times a power of ten
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= most);
}

export function short(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (number >= 1e9) return `${(number / 1e9).toFixed(1)}G`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 100 || Number.isInteger(number) ? `${Math.round(number)}` : number.toFixed(1);
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function frame(svg, most, unit = short) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.replaceChildren();
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  for (const share of [0, 0.5, 1]) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(most * share), y2: y(most * share) }));
    svg.append(make("text", { x: LEFT - 5, y: y(most * share) + 4, "text-anchor": "end" }, unit(most * share)));
  }
  return y;
}

// `series`: {name, colour, values}; one value for each of `times`, in seconds, the last of them now.
export function lines(svg, times, series, seconds, label) {
  const most = nice(Math.max(1, ...series.flatMap((each) => each.values)));
  const y = frame(svg, most), now = times.at(-1) ?? 0;
  const x = (time) => WIDTH - RIGHT - (now - time) / seconds * (WIDTH - LEFT - RIGHT);
  for (const { colour, values } of series) {
    const points = values.map((value, index) => `${x(times[index]).toFixed(1)},${y(value).toFixed(1)}`);
    svg.append(make("polyline", { class: "line", stroke: colour, points: points.join(" ") }));
  }
  ago(svg, seconds);
  legend(svg, series.length > 1 ? series : []);
  svg.setAttribute("aria-label", label);
}

// `columns`: for each minute, the oldest first, a count by outcome.
export function stacks(svg, columns, label) {
  const sums = columns.map((column) => Object.values(column).reduce((sum, each) => sum + each, 0));
  const y = frame(svg, nice(Math.max(1, ...sums)));
  const width = (WIDTH - LEFT - RIGHT) / Math.max(1, columns.length);
  const seen = new Set();
  columns.forEach((column, index) => {
    let sum = 0;
    for (const [outcome, colour] of Object.entries(OUTCOMES)) {
      const count = column[outcome];
      if (!count) continue;
      seen.add(outcome);
      const bar = make("rect", { x: LEFT + index * width + 1, width: Math.max(1, width - 2), fill: colour,
        y: y(sum + count), height: Math.max(0.5, y(sum) - y(sum + count)) });
      bar.append(make("title", {}, `${outcome}: ${count}`));
      svg.append(bar);
      sum += count;
    }
  });
  ago(svg, columns.length * 60);
  legend(svg, [...seen].map((name) => ({ name, colour: OUTCOMES[name] })));
  svg.setAttribute("aria-label", label);
}

// `buckets`: [upper bound, how many up to it], as Prometheus has them; `marks`: {name: seconds}.
export function histogram(svg, buckets, marks, label) {
  const counts = buckets.map(([bound, count], index) => [Number(bound.replace("+Inf", "Infinity")), count - (index ? buckets[index - 1][1] : 0)]);
  const filled = counts.map(([, count]) => count > 0);
  const first = Math.max(0, filled.indexOf(true) - 1), last = Math.max(first + 3, filled.lastIndexOf(true) + 1);
  const shown = counts.slice(first, last + 1);
  const y = frame(svg, nice(Math.max(1, ...shown.map(([, count]) => count))));
  const width = (WIDTH - LEFT - RIGHT) / shown.length;
  shown.forEach(([bound, count], index) => {
    const left = LEFT + index * width;
    const bar = make("rect", { class: "bar", x: left + 1, width: width - 2, y: y(count), height: y(0) - y(count) });
    bar.append(make("title", {}, `${Number.isFinite(bound) ? `up to ${span(bound)}` : "longer"}: ${count}`));
    svg.append(bar);
    const atTheEnd = index === shown.length - 1;
    if (Number.isFinite(bound) && (shown.length < 9 || index % 2 === 0)) {
      svg.append(make("text", { x: left + width, y: HEIGHT - 5, "text-anchor": atTheEnd ? "end" : "middle" }, span(bound)));
    }
  });
  for (const seconds of Object.values(marks)) {
    if (seconds === null || seconds === undefined) continue;
    const index = shown.findIndex(([bound]) => seconds <= bound);
    if (index < 0) continue;
    const low = counts[first + index - 1]?.[0] ?? 0, high = shown[index][0];
    const within = Number.isFinite(high) ? (seconds - low) / (high - low) : 0.5;
    const x = LEFT + (index + Math.min(1, Math.max(0, within))) * width;
    svg.append(make("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: y(0) }));
  }
  note(svg, Object.entries(marks).map(([name, seconds]) => `${name} ${span(seconds)}`).join(", "));
  svg.setAttribute("aria-label", label);
}

function ago(svg, seconds) {
  svg.append(make("text", { x: LEFT, y: HEIGHT - 5 }, `${Math.round(seconds / 60)} min ago`));
  svg.append(make("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, "now"));
}

function note(svg, text) {
  const caption = svg.parentElement.querySelector("figcaption");
  caption.querySelector(".key")?.remove();
  const key = document.createElement("span");
  key.className = "key";
  key.textContent = text && ` ${text}`;
  caption.append(key);
  return key;
}

function legend(svg, series) {
  const key = note(svg, "");
  for (const { name, colour } of series) {
    const dot = document.createElement("i");
    dot.style.background = colour;
    key.append(dot, name);
  }
}
