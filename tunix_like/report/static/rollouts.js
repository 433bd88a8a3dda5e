// The rollout browser: prompts on the left, completions of the selected prompt on the right, coloured by reward.

const MOVES = { U: [-1, 0], D: [1, 0], L: [0, -1], R: [0, 1] };
const AT_ONCE = 100;

const SORTS = {
  advantage: ["advantage", (c) => c.advantage],
  reward: ["reward", (c) => c.reward],
  length: ["length", (c) => c.length],
  sample: ["order of sampling", (c) => -c.sample],
};
const FILTERS = {
  all: ["all completions", () => true],
  passed: ["passed", (c, run) => passes(c, run)],
  failed: ["failed", (c, run) => c.reward !== undefined && !passes(c, run)],
  unscored: ["unscored", (c) => c.reward === undefined],
  clipped: ["truncated at the token limit", (c) => c.clipped],
};
const ORDERS = {
  drawn: ["in sampled order", () => 0],
  hard: ["hardest first", (a, b, run) => rate(a, run) - rate(b, run)],
  easy: ["easiest first", (a, b, run) => rate(b, run) - rate(a, run)],
};

const passes = (completion, run) => completion.reward !== undefined && completion.reward >= run.threshold - 1e-6;

function rate(group, run) {
  const scored = group.completions.filter((each) => each.reward !== undefined);
  return scored.length ? scored.filter((each) => passes(each, run)).length / scored.length : -1;
}

// Maps a reward to a colour: orange for the run's lowest reward, grey, blue for its highest.
function rewardColour(value, [low, high]) {
  if (value === undefined) return "var(--soft)";
  const share = high > low ? (value - low) / (high - low) : 1;
  const end = share < 0.5 ? "--low" : "--high";
  return `color-mix(in srgb, rgb(var(${end})) ${Math.round(200 * Math.abs(share - 0.5))}%, rgb(var(--mid)))`;
}

function rewardRange(run) {
  let [low, high] = [Infinity, -Infinity];
  for (const { steps } of run.rollouts) for (const step of steps) for (const group of step.groups) for (const { reward } of group.completions) {
    if (reward === undefined) continue;
    low = Math.min(low, reward);
    high = Math.max(high, reward);
  }
  return low < high ? [low, high] : [Math.min(0, low), Math.max(1, high)];
}

// Returns the text with every occurrence of `query` marked, as text nodes.
function marked(text, query) {
  const out = document.createDocumentFragment();
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = query ? lower.indexOf(query) : -1; at >= 0; at = lower.indexOf(query, from)) {
    out.append(text.slice(from, at), make("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
  }
  out.append(text.slice(from));
  return out;
}

function maze(grid, moves, passed, colour) {
  const rows = grid.split("\n");
  const node = make("svg:svg", { class: "maze", viewBox: `0 0 ${rows[0].length} ${rows.length}`, role: "img", own: colour, "aria-label": moves === undefined ? "maze" : `maze with a path of ${moves.length} moves` });
  node.append(make("svg:rect", { class: "floor", width: rows[0].length, height: rows.length }));
  let walls = "";
  const marks = [];
  rows.forEach((row, r) => [...row].forEach((cell, c) => {
    if (cell === "#") walls += `M${c} ${r}h1v1h-1z`;
    if (cell === "S" || cell === "G") marks.push(make("svg:rect", { class: cell === "S" ? "start" : "goal", x: c, y: r, width: 1, height: 1 }), make("svg:text", { x: c + 0.5, y: r + 0.53 }, cell));
  }));
  node.append(make("svg:path", { class: "wall", d: walls }), ...marks.filter((mark) => mark.tagName === "rect"));
  if (moves !== undefined) {
    let [r, c] = [1, 1];
    const points = [[c + 0.5, r + 0.5]];
    for (const letter of moves) {
      [r, c] = [r + MOVES[letter][0], c + MOVES[letter][1]];
      points.push([c + 0.5, r + 0.5]);
    }
    node.append(make("svg:polyline", { class: "walked", points: points.map((each) => each.join(",")).join(" ") }));
    if (!passed) node.append(make("svg:path", { class: "stuck", d: `M${c + 0.18} ${r + 0.18}l.64 .64M${c + 0.82} ${r + 0.18}l-.64 .64` }));
  }
  node.append(...marks.filter((mark) => mark.tagName === "text"));
  return node;
}

const CALLS = /(<tool_call>[\s\S]*?(?:<\/tool_call>|(?=<tool_call>)|$))/;

// Returns the parts of a completion: its text, or its turns, those of the model apart from those of the environment.
function shownTexts(each, query) {
  if (!each.turns) return [make("pre", {}, marked(each.text, query))];
  return each.turns.map(({ role, text, name, reward, advantage }) => {
    const own = role === "assistant";
    const numbers = Object.entries({ reward, advantage }).filter(([, value]) => value !== undefined);
    const label = make("div", { class: "role" }, [own ? "model" : role, name, ...numbers.map(([key, value]) => `${key} ${format(value)}`)].filter(Boolean).join(" · "));
    return make("div", { class: own ? "turn" : "turn theirs" }, label, ...(own ? turnParts(text, query) : [make("pre", {}, marked(text, query))]));
  });
}

// Returns the text of a turn of the model, with its tool calls folded; those that match the search are open.
function turnParts(text, query) {
  const parts = isCall(text) ? [text] : text.split(CALLS).filter((part) => part.trim());
  return (parts.length ? parts : [""]).map((part) => {
    const shown = make("pre", {}, marked(part, query));
    if (!part.startsWith("<tool_call>") && !isCall(part)) return shown;
    const call = parsed(part.replace(/^<tool_call>|<\/tool_call>$/g, ""));
    const name = call && typeof call.name === "string" ? call.name : "malformed";
    return make("details", { open: query && part.toLowerCase().includes(query) ? "" : null }, make("summary", {}, `tool call: ${name.slice(0, 80)}`), shown);
  });
}

// Whether a text is a call in the form of Llama 3: one JSON object with a name and parameters.
function isCall(text) {
  const call = text.trim().startsWith("{") ? parsed(text) : null;
  return call !== null && typeof call === "object" && typeof call.name === "string" && "parameters" in call;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function rolloutsSection() {
  const with_ = DATA.runs.map((run, i) => [String(i), run.name]).filter(([i]) => DATA.runs[i].rollouts.length);
  if (!with_.length) return section("rollouts", "Rollouts", make("p", {}, "These runs have no completion files."));
  for (const run of DATA.runs) for (const { steps } of run.rollouts) for (const step of steps) for (const group of step.groups) {
    group.step = step.step;
    group.completions.forEach((each, i) => {
      each.sample = i;
      if (each.turns) each.text = each.turns.map((turn) => turn.text).join("\n");
    });
  }
  const view = { run: Number(with_[0][0]), kept: 0, step: "", query: "", filter: "all", order: "drawn", sort: "advantage", descending: true, chosen: null, most: AT_ONCE };
  const list = make("div", { class: "groups", role: "list", "aria-label": "prompts" });
  const detail = make("div", { class: "card detail" });
  const count = make("span", { class: "note", id: "count", role: "status" });
  const less = make("p", { class: "note", id: "left-out" });
  const change = (key) => (value) => {
    view[key] = value;
    view.most = AT_ONCE;
    draw();
  };
  const steps = select("step", [], change("step"));
  const fillSteps = () => {
    const run = DATA.runs[view.run];
    const kept = run.rollouts[view.kept];
    const numbers = kept.steps.map((each) => String(each.step));
    steps.replaceChildren(...numbers.map((each) => make("option", { value: each }, `step ${each}`)), make("option", { value: "all" }, "all steps"));
    view.step = numbers.includes(view.step) ? view.step : numbers[numbers.length - 1];
    steps.value = view.step;
    less.textContent = kept.left_out;
  };
  const kinds = select("kept", [], (value) => { view.kept = Number(value); fillSteps(); draw(); });
  const fillKinds = () => {
    kinds.replaceChildren(...DATA.runs[view.run].rollouts.map((each, i) => make("option", { value: String(i) }, each.name)));
    view.kept = 0;
    fillSteps();
  };
  const runs = select("run", with_, (value) => { view.run = Number(value); fillKinds(); draw(); });
  const search = make("input", { type: "search", id: "search", placeholder: "search prompts and completions", "aria-label": "search prompts and completions" });
  search.addEventListener("input", () => change("query")(search.value.toLowerCase()));
  const named = (table) => Object.entries(table).map(([key, [text]]) => [key, text]);
  const direction = make("button", { type: "button", id: "direction", title: "reverse the order" }, "▼");
  direction.addEventListener("click", () => {
    view.descending = !view.descending;
    direction.textContent = view.descending ? "▼" : "▲";
    draw();
  });

  // Returns the groups that match filter and search, with their matching completions.
  function found() {
    const run = DATA.runs[view.run];
    const keep = FILTERS[view.filter][1];
    const groups = run.rollouts[view.kept].steps.filter((each) => view.step === "all" || String(each.step) === view.step).flatMap((each) => each.groups);
    const out = [];
    for (const group of groups) {
      const inPrompt = group.prompt.toLowerCase().includes(view.query);
      const left = group.completions.filter((each) => keep(each, run) && (inPrompt || each.text.toLowerCase().includes(view.query)));
      if (left.length) out.push({ group, left });
    }
    const compare = ORDERS[view.order][1];
    return { run, groups: out.sort((a, b) => compare(a.group, b.group, run)), all: groups };
  }

  function draw() {
    const { run, groups, all } = found();
    const colours = rewardRange(run);
    const sum = (parts, size) => parts.reduce((total, each) => total + size(each), 0).toLocaleString("en");
    count.textContent = `${groups.length} of ${all.length} prompts, ${sum(groups, (each) => each.left.length)} of ${sum(all, (each) => each.completions.length)} completions`;
    const chosen = groups.find((each) => each.group === view.chosen) || groups.find((each) => rate(each.group, run) > 0 && rate(each.group, run) < 1) || groups[0];
    view.chosen = chosen ? chosen.group : null;
    list.replaceChildren(...groups.slice(0, view.most).map((each) => entry(each, run, colours)));
    if (groups.length > view.most) list.append(make("button", { type: "button", onclick: () => { view.most += AT_ONCE; draw(); } }, `${groups.length - view.most} more`));
    detail.replaceChildren(...(chosen ? shownGroup(chosen, run, colours) : [make("p", {}, "No matching completions.")]));
  }

  function entry({ group }, run, colours) {
    const cells = group.completions.map((each) => make("i", { class: each.reward === undefined ? "unscored" : null, own: rewardColour(each.reward, colours) }));
    const passed = group.completions.filter((each) => passes(each, run)).length;
    const scored = group.completions.filter((each) => each.reward !== undefined).length;
    const where = [view.step === "all" ? `step ${group.step}` : null, `prompt ${group.problem}`, group.source].filter(Boolean).join(" · ");
    const body = [make("div", { class: "top" }, where, make("span", { class: "rate" }, `${passed}/${scored}`)), group.grid ? null : make("div", { class: "start mono" }, marked(group.prompt.slice(0, 160), view.query)), make("div", { class: "cells" }, ...cells)];
    const inside = group.grid ? [make("div", { class: "withmaze" }, maze(group.grid), make("div", {}, ...body.filter(Boolean)))] : body.filter(Boolean);
    return make("button", { type: "button", role: "listitem", "aria-current": String(group === view.chosen), onclick: () => { view.chosen = group; draw(); } }, ...inside);
  }

  function shownGroup({ group, left }, run, colours) {
    const value = SORTS[view.sort][1];
    const sign = view.descending ? 1 : -1;
    const order = (a, b) => (value(a) === undefined) - (value(b) === undefined) || sign * (value(b) - value(a)) || a.sample - b.sample;
    const sorted = [...left].sort(order);
    const prompt = make("pre", { class: "prompt" }, marked(group.prompt, view.query));
    const top = group.grid ? make("details", {}, make("summary", {}, "prompt text (model input)"), prompt) : prompt;
    const cards = sorted.map((each) => completionCard(each, group, run, colours));
    return [make("h3", {}, `Step ${group.step}, prompt ${group.problem}${group.source ? `, ${group.source}` : ""}: ${left.length} of ${group.completions.length} completions`), top, make("div", { class: `completions ${group.grid ? "mazes" : left.every((each) => !each.turns && each.text.length < 60) ? "short" : ""}` }, ...cards)];
  }

  function completionCard(each, group, run, colours) {
    const colour = rewardColour(each.reward, colours);
    const said = (name, value) => make("span", {}, `${name} `, make("b", {}, format(value)));
    const meta = [
      each.reward === undefined ? make("span", { class: "tag" }, "unscored") : said("reward", each.reward),
      each.shaped === undefined ? null : said("shaped", each.shaped),
      each.advantage === undefined ? null : said("advantage", each.advantage),
      each.length === undefined ? null : said("tokens", each.length),
      each.sampled === undefined ? null : said("sampled", each.sampled),
      each.turns ? said("turns", each.turns.filter((turn) => turn.role === "assistant").length) : null,
      each.clipped ? make("span", { class: "tag" }, "truncated") : null,
      ...Object.entries(each.parts || {}).map(([name, value]) => said(name, value)),
    ];
    const picture = group.grid ? maze(group.grid, each.path, passes(each, run), colour) : null;
    return make("article", { class: each.reward === undefined ? "completion unscored" : "completion", own: colour }, make("div", { class: "meta" }, ...meta.filter(Boolean)), picture, ...shownTexts(each, view.query));
  }

  fillKinds();
  draw();
  const controls = make("div", { class: "controls" }, runs, kinds, steps, search,
    make("label", {}, "show", select("filter", named(FILTERS), change("filter"))),
    make("label", {}, "prompts", select("order", named(ORDERS), change("order"))),
    make("label", {}, "completions by", select("sort", named(SORTS), change("sort")), direction), count);
  return section("rollouts", "Rollouts", less, controls, make("div", { class: "browser" }, list, detail));
}
