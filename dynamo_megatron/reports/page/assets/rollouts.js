"use strict";
// The list of the rollouts in this file, searched and filtered, beside the one that is open.

const LISTED = 200;

function showRollouts(place) {
  const state = {run: 0, search: "", label: "", step: "", kind: "advantage", id: null, ...remembered("rollouts", {})};
  if (state.run >= DATA.runs.length) state.run = 0;
  const list = make("div", {class: "list"}), detail = make("div", {class: "detail"}), notes = make("div", {}), count = make("p", {class: "note"});
  const controls = make("div", {class: "controls"});
  const views = () => DATA.runs[state.run].rollouts.shown;

  function matches(view) {
    const text = `${view.id}\n${view.prompt_id}\n${view.prompt}\n${view.response}`.toLowerCase();
    return text.includes(state.search.toLowerCase()) && (!state.label || view.labels.includes(state.label)) &&
      (!state.step || String(view.step) === state.step);
  }

  function open(id) {
    state.id = id;
    history.replaceState(null, "", "#rollouts/" + encodeURIComponent(id));
    draw();
  }

  function change(name, value) {
    state[name] = value;
    if (name === "run") Object.assign(state, {id: null, label: "", step: ""});
    if (name !== "search") drawControls();
    draw();
  }

  function drawControls() {
    const labels = [...new Set(views().flatMap((view) => view.labels))].sort();
    const steps = DATA.runs[state.run].rollouts.steps.map(String);
    if (!labels.includes(state.label)) state.label = "";  // as it was kept, of an earlier file
    if (!steps.includes(state.step)) state.step = "";
    controls.replaceChildren(
      DATA.runs.length > 1 ? select("run", DATA.runs.map((run, i) => [String(i), visible(run.name)]), String(state.run), (v) => change("run", Number(v))) : "",
      make("label", {}, "search", make("input", {type: "search", id: "search", value: state.search, placeholder: "prompt, its id, response, rollout id",
        input: (event) => change("search", event.target.value)})),
      select("show", [["", "all"], ...labels.map((label) => [label, label])], state.label, (v) => change("label", v)),
      select("step", [["", "all"], ...steps.map((step) => [step, step])], state.step, (v) => change("step", v)));
  }

  function item(view) {
    return make("button", {"aria-current": view.id === state.id ? "true" : false, "data-rollout": view.id, click: () => open(view.id)},
      `${view.id}  reward ${number(view.reward, 3)}, ${view.length} tokens `, ...view.labels.map((label) => make("span", {class: "tag"}, label)),
      make("span", {class: "snippet"}, shortened(view.prompt, 100)), make("span", {class: "snippet"}, "→ " + shortened(view.response, 100)));
  }

  function draw() {
    remember("rollouts", {...state, id: null});
    const run = DATA.runs[state.run], found = views().filter(matches);
    if (!views().some((view) => view.id === state.id)) state.id = found.length ? found[0].id : null;
    list.replaceChildren(...found.slice(0, LISTED).map(item));
    count.textContent = `${found.length} of ${views().length} rollouts` + (found.length > LISTED ? `; the first ${LISTED} are listed` : "") +
      `, of steps ${run.rollouts.steps.join(", ") || "–"}` + (run.rollouts.left_out ? `. ${run.rollouts.left_out} more were left out for the size of this file` : "") +
      ". Others: dynamo-megatron report RUN --rollout ID adds a rollout, dynamo-megatron samples reads all.";
    notes.replaceChildren(...run.rollouts.notes.map((note) => make("p", {class: "note"}, visible(note))));
    const view = views().find((each) => each.id === state.id);
    detail.replaceChildren(view ? rolloutDetail(view, state.kind, (kind) => change("kind", kind)) : "");
  }

  place.append(make("h2", {}, "Rollouts and tokens"), controls, notes, count, make("div", {class: "split"}, list, detail));
  window.openRollout = (id) => {
    const run = DATA.runs.findIndex((each) => each.rollouts.shown.some((view) => view.id === id));
    if (run >= 0) { Object.assign(state, {run, id, search: "", label: "", step: ""}); drawControls(); draw(); }
  };
  drawControls();
  draw();
}
