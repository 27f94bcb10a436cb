"use strict";
// Pairs of responses to the same prompt, which a person reads without knowing the run and marks; preferences as JSONL.

// Which run is on the left is fixed for a prompt, and about half of the time the first one.
function swapped(text) {
  let hash = 2166136261;
  for (const c of text) hash = Math.imul(hash ^ c.codePointAt(0), 16777619);
  return ((hash >>> 15) & 1) === 1;
}

// One object a pair with a preference, as DPO trainers read them: prompt, chosen, rejected; and where they come from.
function preferences(marks) {
  return DATA.pairs.flatMap((pair) => {
    const mark = marks[pair.prompt_id];
    if (mark !== 0 && mark !== 1) return [];
    const [chosen, rejected] = [pair.sides[mark], pair.sides[1 - mark]];
    return [{prompt: pair.prompt, chosen: chosen.response, rejected: rejected.response, prompt_id: pair.prompt_id,
      chosen_run: chosen.run, chosen_step: chosen.step, rejected_run: rejected.run, rejected_step: rejected.step}];
  });
}

// ASCII alone: some readers of lines also end them at U+2028 or U+0085.
function jsonLine(row) {
  return JSON.stringify(row).replace(/[\u007f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")) + "\n";
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], {type: "application/jsonl"}));
  const link = make("a", {href: address, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function showPairs(place) {
  place.append(make("h2", {}, "Pairs of responses"));
  if (!DATA.pairs.length) {
    place.append(make("p", {}, DATA.runs.length < 2
      ? "Name two runs to mark pairs of their responses: dynamo-megatron report RUN RUN2."
      : "The first two runs have no prompt in common with different responses, neither in their last evaluations nor among the rollouts in this file."));
    return;
  }
  // A mark belongs to these two responses: a later report of the same runs has others.
  const keyOf = (pair) => "pair/" + pair.prompt_id + "\n" + pair.sides.map((side) => side.step).join(" ");
  const marks = {};
  for (const pair of DATA.pairs) marks[pair.prompt_id] = remembered(keyOf(pair), null);
  let at = Math.max(0, DATA.pairs.findIndex((pair) => marks[pair.prompt_id] === null));
  const progress = make("p", {class: "note", id: "progress"}), body = make("div", {});
  const save = make("button", {class: "primary", id: "export", click: () =>
    download("preferences.jsonl", preferences(marks).map(jsonLine).join(""))}, "Download preferences.jsonl");

  function go(step) {
    at = (at + step + DATA.pairs.length) % DATA.pairs.length;
    draw();
  }

  function mark(value) {
    const pair = DATA.pairs[at];
    marks[pair.prompt_id] = value;
    remember(keyOf(pair), value);
    draw();
  }

  function sideOf(pair, index, name) {
    const side = pair.sides[index], mine = marks[pair.prompt_id];
    return make("div", {class: mine === index ? "chosen" : ""},
      make("h3", {}, mine === null ? name : `${name}: ${visible(side.run)}, step ${side.step}, reward ${number(side.reward)}`),
      make("div", {class: "box text"}, visible(side.response)),
      make("button", {"data-mark": name, click: () => mark(index)}, `${name} is better`));
  }

  function draw() {
    const pair = DATA.pairs[at], order = swapped(pair.prompt_id) ? [1, 0] : [0, 1], count = preferences(marks).length;
    progress.textContent = `Pair ${at + 1} of ${DATA.pairs.length}; ${Object.values(marks).filter((m) => m !== null).length} marked, ${count} with a preference.`;
    save.disabled = count === 0;
    body.replaceChildren(make("h3", {}, `Prompt ${visible(pair.prompt_id)}`), make("div", {class: "box text"}, visible(pair.prompt)),
      make("div", {class: "sides"}, sideOf(pair, order[0], "left"), sideOf(pair, order[1], "right")),
      make("div", {class: "controls"}, make("button", {"data-mark": "equal", click: () => mark("equal")}, "equal"),
        make("button", {click: () => mark(null)}, "no mark"), make("button", {click: () => go(-1)}, "previous"), make("button", {id: "next", click: () => go(1)}, "next")));
  }

  place.append(make("p", {class: "note"}, "Which run a response is from is shown once the pair is marked. Marks stay in this browser; the download has one " +
    "JSON object for each pair with a preference: prompt, chosen, rejected, and where they come from. Pairs of equal responses, and of very long ones, are not here."),
    make("div", {class: "controls"}, save, progress), body);
  draw();
}
