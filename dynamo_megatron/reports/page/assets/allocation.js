"use strict";
// Who got the rollouts, and what an even split would have given.

function mapChart(place, visits) {
  const text = visits.count.map((row) => row.map((count) => `${count} visits`));
  frame(place, {title: "Difficulty against rollouts over time", unit: "", wide: true, note:
    "A visit is a step that draws the problem. Rows: the share of the problem's rollouts of all earlier steps that solved it. " +
    `Colour: mean rollouts of a visit; an even split gives ${number(visits.uniform)} to each. Empty: no visit. ` +
    `The ${visits.first_visits} first visits, to problems without earlier rollouts, are left out.`},
  [{type: "heatmap", x: visits.steps, y: visits.classes, z: visits.mean, text, colorscale: "Cividis", xgap: 1, ygap: 1,
    colorbar: {title: {text: "rollouts", side: "right"}, thickness: 12},
    hovertemplate: "up to step %{x}, %{y}: %{z:.3g} rollouts, %{text}<extra></extra>"}],
  {margin: {l: 8, r: 8, t: 8, b: 44}, hovermode: "closest", yaxis: {automargin: true},
   xaxis: {title: {text: "training step (end of the column)"}}});
}

function thirdsChart(place, visits) {
  const symbols = ["circle", "square", "diamond"];
  const traces = Object.entries(visits.thirds).filter(([, rows]) => rows.length).map(([name, rows], i) => ({
    x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), text: rows.map((row) => `${row[2]} visits`), name,
    mode: "lines+markers", line: {color: COLOURS[i], dash: DASHES[i]}, marker: {symbol: symbols[i], size: 8},
    hovertemplate: "%{y:.3g} rollouts, %{text}"}));
  traces.push({x: [0, 1], y: [visits.uniform, visits.uniform], name: "an even split", mode: "lines",
    line: {color: "#000", width: 1, dash: "dot"}, hovertemplate: "%{y:.3g}"});
  frame(place, {title: "Rollouts by earlier success rate", unit: "rollouts of a visit, mean", zero: true},
    traces, {xaxis: {title: {text: "earlier success rate of the problem (share)"}, gridcolor: "#e5e5e5"}});
}

function classTable(visits) {
  return table(["success rate before", "visits", "rollouts of a visit", "share of the rollouts", "an even split gives"],
    visits.table.map((row) => [row.class, number(row.visits), number(row.mean, 3), percent(row.share), percent(row.even_share)]));
}

function priceTable(prices) {
  return make("div", {}, make("p", {class: "note"}, "With cost: tokens: the response tokens that the allocator expects of a rollout; of an agent's episode, those of all its answers."),
    table(["expected tokens of a rollout", "visits", "mean", "rollouts of a visit", "share of the expected tokens"],
      prices.map((row) => [row.class, number(row.visits), number(row.tokens, 3), number(row.rollouts, 3), percent(row.share)])));
}

function showAllocationOf(place, run, several) {
  const {visits, why, expected, prices} = run.allocation;
  place.append(make("h2", {}, several ? visible(run.name) : "Rollouts by difficulty"),
    make("p", {class: "note"}, `Allocator: ${visible(run.allocator)}.`));
  if (visits) place.append(classTable(visits)); else place.append(make("p", {}, why));
  if (prices.length) place.append(priceTable(prices));
  const charts = make("div", {class: "charts"});
  place.append(charts);
  if (visits) { mapChart(charts, visits); thirdsChart(charts, visits); }
  const one = [run];
  const signal = {title: "Groups of equal rewards", unit: "share of the groups", zero: true, series:
    [["rollout/zero_variance_groups", "all rewards equal"]], note: "With a baseline of the group alone their advantages are 0."};
  const bounds = {title: "Fewest and most rollouts of a prompt", unit: "rollouts", zero: true, series:
    [["allocation/n_max", "most"], ["allocation/n_min", "fewest"]]};
  for (const chart of [signal, bounds]) {
    const traces = lines(chart, one);
    if (traces.length && !isZero(traces)) frame(charts, chart, traces);
  }
  if (expected.steps.length) frame(charts, {title: "Variance that the allocator expects", unit: "relative to an even split", note:
    "The sum of v / n over the prompts of a step, v as allocation.jsonl has it, against the same sum with equal n. Below 1: " +
    "less variance than an even split if v is right; it is not the measured variance of the gradient."},
    [{x: expected.steps, y: expected.ratio, name: "given", line: {color: COLOURS[0]}},
     {x: [expected.steps[0], expected.steps[expected.steps.length - 1]], y: [1, 1], name: "an even split", mode: "lines", line: {color: "#000", width: 1, dash: "dot"}}]);
  const noise = {title: "Measured variance of the gradient", unit: "squared norm of the gradient", series:
    [["gradient_noise/within", "within a prompt"], ["gradient_noise/between", "between prompts"], ["gradient_noise/signal", "signal"]]};
  const measured = lines(noise, one);
  if (measured.length) frame(charts, noise, measured.map((trace) => ({...trace, mode: "lines+markers", connectgaps: true})));
  else place.append(make("p", {class: "note"}, "The variance of the gradient was not measured (data.shape.every asks for it)."));
}

function showAllocation(place) {
  DATA.runs.forEach((run) => showAllocationOf(place, run, DATA.runs.length > 1));
}
