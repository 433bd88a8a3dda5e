// SVG charts with axes and tooltips, independent of runs.

const SVG = "http://www.w3.org/2000/svg";

// Creates an element with attributes (`on...`: event listeners, `own`: its colour) and children; strings become text nodes.
function make(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "own") node.style.setProperty("--own", value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function format(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (unit === "%") return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

function tickText(value, unit) {
  if (unit === "%") return `${Number((100 * value).toPrecision(3))}%`;
  const size = Math.abs(value);
  if (size >= 1e4) return `${Number((value / 1000).toPrecision(3))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return `${Number(value.toPrecision(3))}`;
}

// Returns about `count` round numbers within [low, high].
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of high / low > 50 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
  }
  const inside = found.filter((each) => each >= low * 0.999 && each <= high * 1.001);
  return inside.length > 7 ? inside.filter((_, i) => i % Math.ceil(inside.length / 6) === 0) : inside;
}

// Creates the axes of a chart: `x` and `y` map values to coordinates, `node` is the SVG with grid and labels.
function axes({ width = 400, height = 210, left = 44, right = 10, top = 8, bottom = 22, xs, ys, unit, log, xText, label }) {
  const node = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const scale = log ? Math.log10 : (value) => value;
  const [low, high] = ys.map(scale);
  const x = (value) => left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((scale(value) - low) / (high - low || 1)) * (height - top - bottom);
  for (const tick of log ? logTicks(...ys) : ticks(...ys, 4)) {
    node.append(make("svg:line", { class: "gridline", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    node.append(make("svg:text", { x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, tickText(tick, unit)));
  }
  for (const tick of ticks(...xs, width / 85)) {
    node.append(make("svg:text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, (xText || tickText)(tick)));
  }
  node.append(make("svg:line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  return { node, x, y, left, right: width - right, top, bottom: height - bottom, width, height };
}

// Returns the range of values with a margin; a single value gets a range around it, and fractions stay within 0 and 1.
function range(values, log, unit) {
  const known = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!known.length) return null;
  let low = Infinity;
  let high = -Infinity;
  for (const value of known) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (unit === "%" && !log && low >= 0 && high <= 1) {
    const spare = Math.max(0.06 * (high - low), 0.02);
    return [Math.max(0, low - spare), Math.min(1, high + spare)];
  }
  const same = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));  // equal up to rounding
  if (log) return same ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (same) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(low) / 2];
  const room = 0.06 * (high - low);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Bias-corrected exponential moving average; null values stay null.
function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function path(xs, ys, ax, log) {
  let out = "";
  let open = false;
  xs.forEach((x, i) => {
    const shown = ys[i] !== null && (!log || ys[i] > 0);
    if (shown) out += `${open ? "L" : "M"}${ax.x(x).toFixed(2)} ${ax.y(ys[i]).toFixed(2)}`;
    open = shown;
  });
  return out;
}

// Line chart of series `{name, colour, xs, ys, dots}`. `smooth` is the weight of the past in the moving average; 0: none.
function lineChart({ series, unit, log, smooth = 0, xText, xName = "step", label }) {
  const drawn = series.map((each) => ({ ...each, mean: smooth && !each.dots ? smoothed(each.ys, smooth) : each.ys }));
  const xs = range(drawn.flatMap((each) => each.xs), false);
  const ys = range(drawn.flatMap((each) => (smooth ? [...each.mean, ...inner(each.ys)] : each.ys)), log, unit);
  if (!xs || !ys) return make("p", { class: "note" }, log ? "Nothing above 0 to show." : "Nothing to show.");
  xs[0] = Math.min(...drawn.map((each) => each.xs[0]));
  xs[1] = Math.max(...drawn.map((each) => each.xs[each.xs.length - 1]));
  if (xs[0] === xs[1]) xs[1] = xs[0] + 1;
  const ax = axes({ xs, ys, unit, log, xText, label });
  const clip = `clip${clips++}`;
  const box = { x: ax.left - 5, y: ax.top - 5, width: ax.right - ax.left + 10, height: ax.bottom - ax.top + 10 };
  ax.node.append(make("svg:clipPath", { id: clip }, make("svg:rect", box)));
  const inside = make("svg:g", { "clip-path": `url(#${clip})` });
  for (const each of drawn) {
    if (each.mean !== each.ys) inside.append(make("svg:path", { class: "raw", d: path(each.xs, each.ys, ax, log), stroke: each.colour }));
  }
  for (const each of drawn) {
    inside.append(make("svg:path", { class: "line", d: path(each.xs, each.mean, ax, log), stroke: each.colour, "stroke-dasharray": each.dash }));
    const alone = each.xs.length <= 40 && (each.dots || each.xs.length === 1);
    if (!alone) continue;
    each.xs.forEach((x, i) => {
      if (each.ys[i] !== null && (!log || each.ys[i] > 0)) inside.append(make("svg:circle", { cx: ax.x(x), cy: ax.y(each.ys[i]), r: 3, fill: each.colour }));
    });
  }
  ax.node.append(inside);
  return withPointer(ax, (value) => {
    const rows = drawn.map((each) => {
      const i = nearest(each.xs, value);
      return { name: each.name, colour: each.colour, x: each.xs[i], text: format(each.mean[i], unit), y: each.mean[i] };
    });
    const at = rows.reduce((best, row) => (Math.abs(row.x - value) < Math.abs(best - value) ? row.x : best), rows[0].x);
    return { at, title: `${xName} ${(xText || ((x) => format(x)))(at)}`, rows: rows.sort((a, b) => (b.y ?? -Infinity) - (a.y ?? -Infinity)) };
  }, xs);
}

let clips = 0;

// Drops the most extreme 1 % of the values at each end, which would flatten the smoothed line.
function inner(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  const cut = Math.floor(known.length / 100);
  return known.slice(cut, known.length - cut);
}

function nearest(xs, value) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
}

function tip(title, rows) {
  const lines = rows.map((row) => make("div", { class: "key", own: row.colour }, make("i"), row.name, make("b", {}, row.text)));
  return make("div", { class: "tip" }, make("div", { class: "note" }, title), ...lines);
}

// Adds a vertical line and a tooltip that follow the pointer; `found(x)` returns `{at, title, rows}`.
function withPointer(ax, found, xs) {
  const holder = make("div", { class: "plot" }, ax.node);
  const cross = make("svg:line", { class: "cross", y1: ax.top, y2: ax.bottom, visibility: "hidden" });
  ax.node.append(cross);
  let shown = null;
  const hide = () => {
    cross.setAttribute("visibility", "hidden");
    if (shown) shown.remove();
    shown = null;
  };
  holder.addEventListener("pointerleave", hide);
  holder.addEventListener("pointermove", (event) => {
    const box = ax.node.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * ax.width;
    const share = Math.min(1, Math.max(0, (place - ax.left) / (ax.right - ax.left)));
    const { at, title, rows } = found(xs[0] + share * (xs[1] - xs[0]));
    hide();
    cross.setAttribute("x1", ax.x(at));
    cross.setAttribute("x2", ax.x(at));
    cross.setAttribute("visibility", "visible");
    shown = tip(title, rows);
    placeTip(holder, shown, event);
  });
  return holder;
}

function placeTip(holder, shown, event) {
  const card = holder.closest(".chart");
  card.append(shown);
  const box = card.getBoundingClientRect();
  const x = event.clientX - box.left;
  const beside = x + 16 + shown.offsetWidth > box.width ? x - 16 - shown.offsetWidth : x + 16;
  shown.style.left = `${Math.max(4, Math.min(beside, box.width - shown.offsetWidth - 4))}px`;
  shown.style.top = `${event.clientY - box.top + 14}px`;
}

// Grouped bar chart over bins; `series` of `{name, colour, values}`.
function barChart({ series, bins, unit, label, ys }) {
  const ax = axes({ xs: [0, bins.length], ys, unit, label, xText: () => "" });
  const wide = (ax.right - ax.left) / bins.length;
  bins.forEach((bin, i) => {
    ax.node.append(make("svg:text", { x: ax.left + (i + 0.5) * wide, y: ax.bottom + 14, "text-anchor": "middle" }, bin));
    series.forEach((each, j) => {
      const value = each.values[i];
      if (!value) return;
      const size = (0.8 * wide) / series.length;
      const x = ax.left + (i + 0.1) * wide + j * size;
      ax.node.append(make("svg:rect", { x, y: ax.y(value), width: Math.max(1, size - 0.6), height: ax.bottom - ax.y(value), fill: each.colour, rx: 1.5 }));
    });
  });
  const at = (value) => Math.max(0, Math.min(bins.length - 1, Math.floor(value)));
  return withPointer(ax, (value) => {
    const i = at(value);
    return { at: i + 0.5, title: `pass rate ${bins[i]}`, rows: series.map((each) => ({ name: each.name, colour: each.colour, text: format(each.values[i], unit) })) };
  }, [0, bins.length]);
}

// Heat map of steps (columns) and bins (rows), darker for larger shares. `cells[column]` is null or a list of shares.
function heatMap({ cells, bins, edges, chosen: [from, to], onchoose, label, name }) {
  const [width, height, left, top, bottom] = [620, 190, 44, 6, 22];
  const node = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const [wide, tall] = [(width - left - 6) / cells.length, (height - top - bottom) / bins.length];
  bins.forEach((bin, i) => {
    node.append(make("svg:text", { x: left - 6, y: height - bottom - (i + 0.5) * tall + 3.5, "text-anchor": "end" }, bin));
  });
  const most = Math.max(1e-9, ...cells.flatMap((column) => column || []));
  cells.forEach((column, i) => {
    const x = left + i * wide;
    (column || []).forEach((value, j) => {
      const y = height - bottom - (j + 1) * tall;
      const fill = value ? `rgba(var(--heat), ${(0.06 + 0.94 * (value / most)).toFixed(3)})` : "var(--grid)";
      const cell = make("svg:rect", { x, y, width: wide + (wide > 8 ? -1 : 0.3), height: tall - 1 });
      cell.style.fill = fill;
      node.append(cell);
    });
  });
  for (const tick of ticks(edges[0], edges[1], 6)) {
    if (!Number.isInteger(tick)) continue;
    const x = left + ((tick - edges[0] + 0.5) / (edges[1] - edges[0] + 1)) * (width - left - 6);
    node.append(make("svg:text", { x, y: height - 6, "text-anchor": "middle" }, tickText(tick)));
  }
  const frame = make("svg:rect", { x: left + from * wide, y: top - 2, width: (to - from + 1) * wide, height: height - top - bottom + 3, fill: "none", "stroke-width": 1.5 });
  frame.style.stroke = "var(--ink)";
  node.append(frame);
  const holder = make("div", { class: "plot" }, node);
  let shown = null;
  const place = (event) => {
    const box = node.getBoundingClientRect();
    const across = Math.floor((((event.clientX - box.left) / box.width) * width - left) / wide);
    const up = Math.floor((height - bottom - ((event.clientY - box.top) / box.height) * height) / tall);
    const inside = across >= 0 && across < cells.length && up >= 0 && up < bins.length && cells[across];
    return inside ? { across, up } : null;
  };
  holder.addEventListener("pointerleave", () => shown && shown.remove());
  holder.addEventListener("pointermove", (event) => {
    const found = place(event);
    if (shown) shown.remove();
    if (!found) return;
    shown = tip(name(found.across), [{ name: `pass rate ${bins[found.up]}`, colour: "rgb(var(--heat))", text: format(cells[found.across][found.up], "%") }]);
    placeTip(holder, shown, event);
  });
  holder.addEventListener("click", (event) => {
    const found = place(event);
    if (found) onchoose(found.across);
  });
  return holder;
}

// Stacked area chart of shares over x. `parts` of `{name, colour, values}`, one value for each of `xs`.
function shareChart({ parts, xs, label }) {
  const ax = axes({ width: 620, height: 170, xs: [xs[0], Math.max(xs[xs.length - 1], xs[0] + 1)], ys: [0, 1], unit: "%", label });
  const totals = xs.map((_, i) => parts.reduce((sum, part) => sum + part.values[i], 0) || 1);
  const below = xs.map(() => 0);
  for (const part of parts) {
    const lower = xs.map((x, i) => `${ax.x(x).toFixed(1)} ${ax.y(below[i]).toFixed(1)}`).reverse();
    part.values.forEach((value, i) => { below[i] += value / totals[i]; });
    const upper = xs.map((x, i) => `${ax.x(x).toFixed(1)} ${ax.y(below[i]).toFixed(1)}`);
    ax.node.append(make("svg:path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: part.colour }));
  }
  return withPointer(ax, (value) => {
    const i = nearest(xs, value);
    const rows = parts.map((part) => ({ name: part.name, colour: part.colour, text: `${format(part.values[i])} s, ${format(part.values[i] / totals[i], "%")}` }));
    return { at: xs[i], title: `step ${xs[i]}`, rows: rows.reverse() };
  }, [xs[0], xs[xs.length - 1]]);
}
