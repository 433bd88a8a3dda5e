// The sections overview, curves, pass rates and time, drawn from DATA and STATE.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STATE = { hidden: new Set(), smooth: 0.6, against: "step", window: 0 };
const BINS = ["0", "⅛", "¼", "⅜", "½", "⅝", "¾", "⅞", "<1", "1"];
const WINDOWS = 48;
const AROUND = 2;  // number of neighbouring windows on each side that the bars include, since single steps have few prompts
const drawn = [];

const colourOf = (i) => `var(--run${i % 8})`;
const dashOf = (i) => (i >= 8 ? "5 4" : undefined);
const shownRuns = () => DATA.runs.map((run, i) => ({ run, i })).filter(({ i }) => !STATE.hidden.has(i));

// A part of the page that is redrawn when STATE changes.
function live(draw) {
  const node = make("div");
  const again = () => node.replaceChildren(...[draw()].flat().filter(Boolean));
  drawn.push(again);
  again();
  return node;
}

const redraw = () => drawn.forEach((each) => each());

function section(id, title, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

function card(title, unit, ...children) {
  const head = make("div", { class: "head" }, make("h3", {}, title), make("span", { class: "unit" }, unit === "%" ? "" : unit));
  return make("div", { class: "card chart" }, head, ...children);
}

function toolbar() {
  const chips = DATA.runs.map((run, i) => {
    const toggle = (event) => {
      if (!STATE.hidden.delete(i)) STATE.hidden.add(i);
      event.currentTarget.setAttribute("aria-pressed", String(!STATE.hidden.has(i)));
      redraw();
    };
    return make("button", { class: "chip", type: "button", "aria-pressed": "true", own: colourOf(i), onclick: toggle }, make("i"), run.name);
  });
  const smooth = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: STATE.smooth, id: "smooth" });
  smooth.addEventListener("input", () => { STATE.smooth = Number(smooth.value); redraw(); });
  const against = select("against", [["step", "step"], ["time", "time in steps"]], (value) => { STATE.against = value; redraw(); });
  const links = ["Overview", "Curves", "Pass rates", "Time", "Rollouts"].map((name) => make("a", { href: `#${slug(name)}` }, name));
  return make("div", { class: "bar" }, make("div", { class: "chips" }, ...chips), make("label", {}, "smoothing", smooth), make("label", {}, "against", against), make("nav", {}, ...links));
}

const slug = (name) => name.toLowerCase().replace(" ", "-");

function select(id, options, onchoose) {
  const node = make("select", { id }, ...options.map(([value, text]) => make("option", { value }, text)));
  node.addEventListener("change", () => onchoose(node.value));
  return node;
}

function overview() {
  const names = [...new Set(DATA.runs.flatMap((run) => run.facts.map(([name]) => name)))];
  const facts = DATA.runs.map((run, i) => {
    const known = Object.fromEntries(run.facts);
    return [make("span", { class: "key", own: colourOf(i) }, make("i"), make("b", {}, run.name)), ...names.map((name) => known[name] || "–")];
  });
  const parts = [make("div", { class: "card wide" }, table(["run", ...names], facts))];
  if (DATA.summary.length) parts.push(make("div", { class: "card stacked wide" }, make("h3", {}, "First → last"), summaryTable(), make("p", { class: "note" }, `Held out: the first, the last and the best evaluation. Training: means over ${DATA.ends} steps.`)));
  if (DATA.differing.length) parts.push(make("div", { class: "card stacked wide" }, make("h3", {}, "Where the configs differ"), table(["key", ...DATA.runs.map((run) => run.name)], DATA.differing.map((row) => [make("code", {}, row.key), ...row.values]))));
  for (const run of DATA.runs) {
    const keys = Object.entries(run.config);
    if (keys.length) parts.push(make("details", {}, make("summary", {}, `Full config of ${run.name}`), make("div", { class: "card wide" }, table(["key", "value"], keys.map(([key, value]) => [make("code", {}, key), value])))));
  }
  return section("overview", "Overview", ...parts);
}

function table(heads, rows) {
  const body = rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...body));
}

function summaryTable() {
  const rows = DATA.summary.map((row) => [row.title, ...row.cells.map((cell) => {
    if (!cell) return "–";
    const best = cell.best === undefined ? null : make("span", { class: "then" }, `, best ${format(cell.best, row.unit)} at ${cell.step}`);
    const first = cell.first === undefined ? null : make("span", { class: "then" }, `${format(cell.first, row.unit)} → `);
    return make("span", {}, first, make("b", {}, format(cell.last, row.unit)), best);
  })]);
  return table(["", ...DATA.runs.map((run) => run.name)], rows);
}

// The series of a metric for the visible runs; steps without an evaluation are skipped.
function seriesOf(curve) {
  return shownRuns().flatMap(({ run, i }) => {
    const phase = run[curve.phase];
    const column = phase.columns[curve.key];
    if (!column) return [];
    const sparse = curve.key.includes("eval/");
    const xs = STATE.against === "time" ? phase.columns.seconds : phase.steps;
    const kept = column.map((_, j) => j).filter((j) => (sparse ? column[j] !== null : phase.steps[j] > 0));
    if (!kept.length) return [];
    return [{ name: run.name, colour: colourOf(i), dash: dashOf(i), dots: sparse, xs: kept.map((j) => xs[j]), ys: kept.map((j) => column[j]) }];
  });
}

function clockText(seconds) {
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return seconds < 7200 ? `${Number((seconds / 60).toPrecision(3))} min` : `${Number((seconds / 3600).toPrecision(3))} h`;
}

function curveCard(curve) {
  const options = { log: curve.log };
  const button = make("button", { type: "button", "aria-pressed": String(options.log), title: "logarithmic axis" }, "log");
  const body = live(() => {
    const series = seriesOf(curve);
    if (!series.length) return make("p", { class: "note" }, "Not recorded by the runs shown.");
    const time = STATE.against === "time";
    return lineChart({ series, unit: curve.unit, log: options.log, smooth: STATE.smooth, xText: time ? clockText : undefined, xName: time ? "after" : "step", label: describe(curve, series) });
  });
  const again = drawn[drawn.length - 1];
  button.addEventListener("click", () => {
    options.log = !options.log;
    button.setAttribute("aria-pressed", String(options.log));
    again();
  });
  const out = card(curve.title, curve.unit, body);
  out.dataset.key = curve.key;
  out.querySelector(".head").append(button);
  return out;
}

function describe(curve, series) {
  return `${curve.title}: ${series.map((each) => `${each.name} ends at ${format(each.ys[each.ys.length - 1], curve.unit)}`).join(", ")}`;
}

function curvesSection() {
  const main = make("div", { class: "grid" }, ...DATA.curves.map(curveCard));
  const parts = [main];
  const less = DATA.runs.filter((run) => run.rl.left_out + run.sft.left_out);
  for (const run of less) parts.push(make("p", { class: "note" }, `${run.name}: ${run.rl.left_out + run.sft.left_out} steps are left out to keep this page small; the others are evenly spread.`));
  if (DATA.missing.length) parts.push(make("p", { class: "note" }, `Not shown. ${DATA.missing.join(" ")}`));
  if (DATA.others.length) {
    const box = make("details", {}, make("summary", {}, `All ${DATA.others.length} other metrics`));
    box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(make("div", { class: "grid" }, ...DATA.others.map(curveCard))));
    parts.push(box);
  }
  return section("curves", "Curves", ...parts);
}

// Divides the steps of all runs into at most WINDOWS windows of equal length, as [first, last].
function windows() {
  const last = Math.max(...DATA.runs.map((run) => run.rl.steps[run.rl.steps.length - 1] || 0));
  const count = Math.min(WINDOWS, last);
  return Array.from({ length: count }, (_, i) => [1 + Math.floor((i * last) / count), Math.floor(((i + 1) * last) / count)]);
}

// Sums a histogram over the steps of each window: ten numbers or null.
function summed(run, name, spans) {
  const rows = run.histograms[name];
  return spans.map(([first, last]) => {
    const inside = (rows || []).filter((row, i) => row && run.rl.steps[i] >= first && run.rl.steps[i] <= last);
    return inside.length ? BINS.map((_, bin) => inside.reduce((sum, row) => sum + row[bin], 0)) : null;
  });
}

function shares(row) {
  const total = row ? row.reduce((a, b) => a + b, 0) : 0;
  return row && total ? row.map((value) => value / total) : null;
}

const each = (a, b, f) => (a && b ? a.map((value, i) => f(value, b[i])) : null);

// The mean gradient norm of a prompt in each bin.
function gradientCard() {
  const mean = (norms) => (norms.length ? norms.reduce((a, b) => a + b, 0) / norms.length : null);
  const byBin = DATA.gradients.map(({ bins, norms }) => BINS.map((_, bin) => mean(norms.filter((_, i) => bins[i] === bin))));
  const ys = [0, 1.05 * Math.max(1e-12, ...byBin.flat().filter((value) => value !== null))];
  const out = card("Gradient norm of one prompt", "", live(() => barChart({ series: shownRuns().map(({ run, i }) => ({ name: run.name, colour: colourOf(i), values: byBin[i] })), bins: BINS, label: "Gradient norm of one prompt by pass rate", ys })));
  out.id = "gradients";
  const measured = DATA.gradients.map((each, i) => `${DATA.runs[i].name}: ${each.norms.length} training prompts under ${each.origin}`);
  out.append(make("p", { class: "note" }, `Mean over the prompts of a pass rate. Each gradient is computed separately, with its weight in the batch and without KL. ${measured.join("; ")}.`));
  return out;
}

function passRates() {
  const recorded = DATA.runs.some((run) => run.histograms.drawn);
  if (!recorded) return section("pass-rates", "Pass rates", make("p", {}, "These runs did not record the pass rates of their prompts."), DATA.gradients.length ? gradientCard() : null);
  const spans = windows();
  STATE.window = spans.length - 1;
  const sums = DATA.runs.map((run) => Object.fromEntries(["drawn", "trained", "advantage", "all"].map((name) => [name, summed(run, name, spans)])));
  const around = (i) => [Math.max(0, i - AROUND), Math.min(spans.length - 1, i + AROUND)];
  const stretch = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
  const text = (i) => stretch(spans[around(i)[0]][0], spans[around(i)[1]][1]);
  const near = (rows, i) => {
    const known = rows.slice(around(i)[0], around(i)[1] + 1).filter(Boolean);
    return known.length ? BINS.map((_, bin) => known.reduce((sum, row) => sum + row[bin], 0)) : null;
  };
  const slider = make("input", { type: "range", min: 0, max: spans.length - 1, step: 1, value: STATE.window, id: "window", "aria-label": "steps" });
  const said = make("output", { for: "window" }, text(STATE.window));
  const parts = [];
  const choose = (i) => {
    STATE.window = i;
    slider.value = i;
    said.textContent = text(i);
    parts.forEach((again) => again());
  };
  slider.addEventListener("input", () => choose(Number(slider.value)));
  const part = (draw) => {
    const node = live(draw);
    parts.push(drawn[drawn.length - 1]);
    return node;
  };
  const bars = (title, note, values, unit, ys) => card(title, "", part(() => {
    const series = shownRuns().map(({ run, i }) => ({ name: run.name, colour: colourOf(i), values: values(sums[i], STATE.window) })).filter((row) => row.values);
    return series.length ? barChart({ series, bins: BINS, unit, label: title, ys }) : make("p", { class: "note" }, "No visible run recorded these steps.");
  }), make("p", { class: "note" }, note));
  const top = (values) => Math.max(1e-9, ...sums.flatMap((sum) => spans.flatMap((_, i) => values(sum, i) || []))) * 1.05;
  const drawnShare = (sum, i) => shares(near(sum.drawn, i));
  const advantageShare = (sum, i) => shares(near(sum.advantage, i));
  const perPrompt = (sum, i) => each(near(sum.advantage, i), near(sum.trained, i), (total, count) => (count ? total / count : null));
  const charts = make("div", { class: DATA.gradients.length ? "grid four" : "grid three" },
    bars("Prompts by pass rate", "Share of the prompts drawn.", drawnShare, "%", [0, top(drawnShare)]),
    bars("Advantage by pass rate", "Share of the sum of |advantage| over all prompts.", advantageShare, "%", [0, top(advantageShare)]),
    bars("|advantage| of one prompt", "Mean over the completions of a prompt, by its pass rate.", perPrompt, "", [0, top(perPrompt)]),
    DATA.gradients.length ? gradientCard() : null);
  const maps = part(() => make("div", { class: "grid two" }, ...shownRuns().filter(({ i }) => sums[i].drawn.some(Boolean)).flatMap(({ run, i }) => [["Prompts", "drawn"], ["|advantage|", "advantage"], ["All prompts seen so far", "all"]].filter(([, name]) => sums[i][name].some(Boolean)).map(([what, name]) => {
    const cells = sums[i][name].map(shares);
    const map = heatMap({ cells, bins: BINS, edges: [spans[0][0], spans[spans.length - 1][1]], chosen: around(STATE.window), onchoose: choose, label: `${what} by pass rate, ${run.name}`, name: (column) => stretch(...spans[column]) });
    return make("div", { class: "card chart" }, make("div", { class: "head" }, make("h3", { class: "key", own: colourOf(i) }, make("i"), `${what} by pass rate, ${run.name}`)), map);
  }))));
  let timer = null;
  const play = make("button", { type: "button", id: "play" }, "play");
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  play.addEventListener("click", () => {
    if (timer) { stop(); return; }
    play.textContent = "stop";
    choose(0);
    timer = setInterval(() => (STATE.window + 1 < spans.length ? choose(STATE.window + 1) : stop()), 180);
  });
  return section("pass-rates", "Pass rates and advantages",
    make("p", {}, `Prompts by the fraction of their scored completions that pass: none, eight bins of equal width (including the upper edge), all. |advantage| is the weight that the estimator gives to a prompt. It is not a gradient norm: it ignores lengths, aggregation and cancellation between gradients.`),
    make("div", { class: "controls" }, play, make("label", {}, "training", slider), said), charts, maps);
}

function traceLinks() {
  const links = DATA.runs.filter((run) => run.trace).flatMap((run) => [make("a", { href: run.trace, download: "" }, `trace.json of ${run.name}`), ", "]);
  return links.length ? make("p", { class: "note" }, "Every activity and call on one time line: ", ...links.slice(0, -1), ". Download it, and open it in ui.perfetto.dev (Open trace file) or in speedscope.") : null;
}

function timeSection() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.rl.columns).filter((key) => key.startsWith("train/time/"))))];
  if (!names.length) return section("time", "Time", make("p", {}, "These runs recorded no times."), traceLinks());
  const order = DATA.parts;
  const parts = names.map((key) => key.slice(11)).sort((a, b) => (order.indexOf(a) + 99) % 99 - (order.indexOf(b) + 99) % 99);
  const colour = (name) => `var(--t${order.indexOf(name)}, #888)`;
  const legend = make("div", { class: "legend" }, ...parts.map((name) => make("span", { class: "key", own: colour(name) }, make("i"), name)));
  const body = live(() => make("div", { class: "grid three" }, ...shownRuns().filter(({ run }) => parts.some((name) => run.rl.columns[`train/time/${name}`])).map(({ run, i }) => {
    const spans = windows().filter(([first]) => first <= run.rl.steps[run.rl.steps.length - 1]);
    const sum = (name, first, last) => (run.rl.columns[`train/time/${name}`] || []).reduce((total, value, j) => total + (run.rl.steps[j] >= first && run.rl.steps[j] <= last ? value || 0 : 0), 0);
    const totals = parts.map((name) => ({ name, value: sum(name, 0, Infinity) }));
    const whole = totals.reduce((a, b) => a + b.value, 0) || 1;
    const said = totals.filter((each) => each.value / whole >= 0.005).sort((a, b) => b.value - a.value).map((each) => `${each.name} ${Math.round((100 * each.value) / whole)} %`).join(", ");
    const chart = shareChart({ xs: spans.map(([, last]) => last), parts: parts.map((name) => ({ name, colour: colour(name), values: spans.map(([first, last]) => sum(name, first, last)) })), label: `Time of ${run.name}: ${said}` });
    return make("div", { class: "card chart" }, make("h3", { class: "key", own: colourOf(i) }, make("i"), run.name), chart, make("p", { class: "note" }, `${clockText(whole)} in all: ${said}.`));
  })));
  return section("time", "Time", make("p", {}, "Share of the step time in each window of steps, without evaluations and checkpoints."), body, legend, traceLinks());
}
