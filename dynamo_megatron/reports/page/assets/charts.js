"use strict";
// The charts of the metrics. `series`: metric and name; `zero`: the axis begins at 0; `optional`: not missed where the
// run has no such metric. A metric with a moving average has it as a thick line.

const PHASES = [["generate", "generate"], ["logprobs", "logprobs"], ["update", "update"], ["reshard", "weight sync"],
  ["other", "other"], ["evaluate", "evaluate"], ["save", "save"]];
const AT_SOME_STEPS = ["evaluate", "save"];

const CHARTS = [
  {title: "Reward", unit: "reward, mean of a step", series: [["reward/mean", "training reward"]],
   evaluations: true, note: "Points: share of held-out problems solved, with the 95 % interval over problems."},
  {title: "Success", unit: "share of rollouts", series: [["reward/success", "solved"]], zero: true},
  {title: "Policy entropy", unit: "nats per token", series: [["policy/entropy", "entropy"]], zero: true},
  {title: "KL", unit: "nats per token", series: [["policy/kl", "policy to reference"],
   ["rollout_correction/kl", "policy to engine"]],
   note: "The KL to a reference is measured where algorithm.kl.coef is above 0."},
  {title: "Gap of the logprobs, policy and engine", unit: "nats", log: true,
   series: [["rollout/logprob_gap_mean", "mean"], ["rollout/logprob_gap_max", "largest"]]},
  {title: "Response length", unit: "tokens, mean", series: [["rollout/response_length_mean", "length"]], zero: true},
  {title: "Responses that are not whole", unit: "share of rollouts", zero: true, series: [["rollout/truncated", "truncated"],
   ["rollout/aborted", "aborted"], ["rollout/failed", "failed"], ["rollout/rejected", "rejected"]]},
  {title: "Gradient norm", unit: "norm, before clipping", series: [["policy/grad_norm", "gradient"]], zero: true},
  {title: "Clipped tokens", unit: "share of tokens", zero: true, series: [["policy/clip_share", "clipped"],
   ["policy/clip_c_share", "by the dual clip"]]},
  {title: "Modulated tokens", unit: "share of tokens", zero: true, series: [["policy/boosted_share", "boosted (above 1.1)"],
   ["policy/damped_share", "damped (below 0.9)"]]},
  {title: "Utilisation", unit: "share", zero: true,
   series: [["fleet/busy_share_mean", "servers busy, of the generation time"], ["fleet/busy_share_min", "the least busy server"],
   ["fleet/idle_share", "servers idle, of all time"], ["resources/cpu", "processor cores busy, of all time"]]},
  {title: "Tail of the generation", unit: "seconds", zero: true, series: [["time/generate", "generation"],
   ["time/generate_tail", "of it the tail"]], note: "The tail: the seconds after 90 % of the responses were there."},
  {title: "Throughput", unit: "tokens per second", zero: true, series: [["throughput/tokens_per_second", "all tokens"]]},
  {title: "Age of the weights", unit: "steps", zero: true, series: [["rollout/staleness_mean", "mean of the tokens"],
   ["rollout/staleness_max", "oldest token"]], optional: true},
];

function layoutOf(chart, more) {
  return {
    margin: {l: 58, r: 12, t: 8, b: 44}, hovermode: "x unified", font: {size: 12, color: "#1a1a1a"},
    xaxis: {title: {text: "training step"}, gridcolor: "#e5e5e5", zeroline: false},
    yaxis: {title: {text: chart.unit}, gridcolor: "#e5e5e5", zerolinecolor: "#999", type: chart.log ? "log" : "linear",
            rangemode: chart.zero ? "tozero" : "normal", exponentformat: "power", automargin: true},
    legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: {size: 11}, traceorder: "normal"}, ...more,
  };
}

// Charts whose frames are there. They are drawn one after another, once the frames have found their widths, so that the
// page can be used meanwhile; those of a part that is hidden again wait for it.
const PENDING = [];

function drawPending() {
  const next = PENDING.findIndex(({plot}) => plot.offsetParent !== null);
  if (next < 0) return;
  PENDING.splice(next, 1)[0].draw();
  setTimeout(drawPending);
}

// A frame with title and note, and its chart.
function frame(place, chart, traces, more) {
  const plot = make("div", {class: "plot"});
  const box = make("div", {class: chart.wide ? "chart wide" : "chart"}, make("h3", {}, chart.title),
    chart.note ? make("p", {class: "note"}, chart.note) : null, plot);
  place.append(box);
  PENDING.push({plot, draw: () => Plotly.newPlot(plot, traces, layoutOf(chart, more), {responsive: true, displayModeBar: false})});
}

function lines(chart, runs) {
  const traces = [];
  runs.forEach((run, r) => chart.series.forEach(([metric, name], s) => {
    const values = run.curves.values[metric];
    if (!values) return;
    const colour = COLOURS[(runs.length > 1 ? r : s) % COLOURS.length];
    const label = runs.length > 1 ? `${escaped(run.name)}${chart.series.length > 1 ? ": " + name : ""}` : name;
    const line = {color: colour, dash: DASHES[s % DASHES.length]};
    const smooth = run.curves.smooth[metric];
    const shown = chart.log ? values.map((v) => (v > 0 ? v : null)) : values;
    traces.push({x: run.curves.steps, y: shown, name: smooth ? label + ", each step" : label, mode: values.length > 1 ? "lines" : "markers",
      line: {...line, width: smooth ? 1 : 2}, opacity: smooth ? 0.4 : 1, showlegend: !smooth || runs.length === 1});
    if (smooth) traces.push({x: run.curves.steps, y: smooth, name: `${label}, mean of ${run.curves.window} steps`, mode: "lines", line: {...line, width: 2.5}});
  }));
  return traces;
}

function isZero(traces) {
  return traces.every((trace) => trace.y.every((value) => !value));
}

function passes(runs) {
  return runs.flatMap((run, r) => Object.entries(run.curves.evaluations).map(([k, rows], i) => ({
    x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), mode: "markers", type: "scatter",
    name: `${runs.length > 1 ? escaped(run.name) + ": " : ""}pass@${k}`,
    marker: {color: COLOURS[(runs.length > 1 ? r : i + 1) % COLOURS.length], size: 9, symbol: ["circle", "square", "diamond", "cross"][i % 4]},
    error_y: {type: "data", symmetric: false, array: rows.map((row) => row[3] - row[1]), arrayminus: rows.map((row) => row[1] - row[2])},
  })));
}

function timeChart(place, run, several) {
  const phases = PHASES.filter(([key]) => run.curves.values["time/" + key]);
  if (!phases.length) return;
  const totals = run.curves.steps.map((_, i) => phases.reduce((sum, [key]) => sum + (run.curves.values["time/" + key][i] || 0), 0));
  const ordered = [...totals].sort((a, b) => a - b);
  const usual = ordered[Math.floor(0.95 * (ordered.length - 1))], most = ordered[ordered.length - 1];
  const cut = most > 3 * usual;
  const chart = {title: "Time of a step by phase" + (several ? ": " + visible(run.name) : ""), unit: "seconds", wide: true,
    note: "The phases add up to the step." + (cut ? ` The longest step takes ${number(most, 3)} s, outside of the picture: double-click shows it.` : "")};
  const below = run.curves.steps.map(() => 0);  // the phases of every step, on which the bars stand
  frame(place, chart, phases.map(([key, name], i) => {
    const y = run.curves.values["time/" + key].map((v) => v || 0), x = run.curves.steps, hovertemplate = "%{y:.3g} s";
    const base = [...below];
    y.forEach((v, at) => { below[at] += v; });
    return AT_SOME_STEPS.includes(key) ? {x, y, base, name, type: "bar", marker: {color: COLOURS[i]}, hovertemplate}
      : {x, y, name, stackgroup: "time", line: {width: 0.5, color: COLOURS[i]}, fillcolor: COLOURS[i], hovertemplate};
  }), {barmode: "overlay", ...(cut ? {yaxis: {title: {text: "seconds"}, gridcolor: "#e5e5e5", range: [0, 1.25 * usual]}} : {})});
}

function scoresOf(run, several) {
  const {said, rows} = run.scores;
  return make("div", {}, several ? make("h3", {}, visible(run.name)) : null, make("p", {class: "note"}, said.replace(/`/g, "")),
    rows.length ? table(rows[0], rows.slice(1)) : null);
}

// Folded where none warns.
function findingsOf(run, several) {
  const states = ["warning", "fine", "not measured"];
  const checks = [...run.findings].sort((a, b) => states.indexOf(a.state) - states.indexOf(b.state));
  const counts = states.map((state) => [checks.filter((check) => check.state === state).length, state]).filter(([count]) => count);
  return make("details", {class: "findings", open: checks[0].state === "warning"},
    make("summary", {}, (several ? visible(run.name) + ": " : "") + counts.map(([count, state]) => `${count} ${state}`).join(", ")),
    ...checks.map((check) => make("div", {class: "check"}, make("span", {class: "state " + check.state.split(" ")[0]}, check.state),
      make("div", {}, make("strong", {}, check.name), make("div", {class: "note"}, visible(check.text))))));
}

function showOverview(place) {
  const runs = DATA.runs, several = runs.length > 1;
  place.append(make("h2", {}, "Held-out problems before and after"), ...runs.map((run) => scoresOf(run, several)),
    make("h2", {}, "Checks"), ...runs.map((run) => findingsOf(run, several)), make("h2", {}, "Metrics"));
  const wide = runs.filter((run) => run.curves.width > 1);
  if (wide.length) place.append(make("p", {class: "note"}, wide.map((run) => `${visible(run.name)}: each point is the mean of ${run.curves.width} steps`).join("; ") + "."));
  const charts = make("div", {class: "charts"}), missing = [], zero = [];
  place.append(charts);
  for (const chart of CHARTS) {
    const points = chart.evaluations ? passes(runs) : [], traces = [...lines(chart, runs), ...points];
    if (traces.length && isZero(traces)) zero.push(chart.title);
    else if (traces.length) frame(charts, chart.evaluations && !points.length ? {...chart, note: null} : chart, traces);
    else if (!chart.optional) missing.push(chart.title);
  }
  runs.forEach((run) => timeChart(charts, run, several));
  if (missing.length) place.append(make("p", {class: "note"}, "Not in the metrics of this run: " + missing.join(", ") + "."));
  if (zero.length) place.append(make("p", {class: "note"}, "0 at every step: " + zero.join(", ") + "."));
}
