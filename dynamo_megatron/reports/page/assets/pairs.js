"use strict";
// Pairs of responses to the same prompt, which a person reads without knowing the run and marks; preferences as JSONL.

// Which run is on the left is fixed for a prompt, and about half of the time the first one.
function swapped(text) {
  let hash = 2166136261;
  for (const c of text) hash = Math.imul(hash ^ c.codePointAt(0), 16777619);
  return ((hash >>> 15) & 1) === 1;
}

// `marks`: a pair's key -> 0 or 1, the side that is better, "equal" or null.
// One object a pair with a preference, as DPO trainers read them: prompt, chosen, rejected; and where they come from.
function preferences(marks) {
  return DATA.pairs.shown.flatMap((pair) => {
    const mark = marks[pair.key];
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
  const pairs = DATA.pairs.shown, others = DATA.pairs.other_prompts;
  if (others) place.append(make("p", {class: "note"}, `${others} prompt ids are in both runs with different texts; they are left out.`));
  // A mark belongs to the texts that were read: a later report of the same folders may have others.
  const marks = {};
  for (const pair of pairs) marks[pair.key] = remembered("pair/" + pair.key, null);
  let at = Math.max(0, pairs.findIndex((pair) => marks[pair.key] === null));
  const progress = make("p", {class: "note", id: "progress"}), body = make("div", {});
  const save = make("button", {class: "primary", id: "export", click: () =>
    download("preferences.jsonl", preferences(marks).map(jsonLine).join(""))}, "Download preferences.jsonl");

  function go(step) {
    at = (at + step + pairs.length) % pairs.length;
    draw();
  }

  function mark(value) {
    const pair = pairs[at];
    marks[pair.key] = value;
    remember("pair/" + pair.key, value);
    draw();
  }

  function sideOf(pair, index, name) {
    const side = pair.sides[index], mine = marks[pair.key];
    return make("div", {class: mine === index ? "chosen" : ""},
      make("h3", {}, mine === null ? name : `${name}: ${visible(side.run)}, step ${side.step}, reward ${number(side.reward)}`),
      make("div", {class: "box text"}, visible(side.response)),
      make("button", {"data-mark": name, click: () => mark(index)}, `${name} is better`));
  }

  function draw() {
    const pair = pairs[at], order = swapped(pair.prompt_id) ? [1, 0] : [0, 1], count = preferences(marks).length;
    progress.textContent = `Pair ${at + 1} of ${pairs.length}; ${Object.values(marks).filter((m) => m !== null).length} marked, ${count} with a preference.`;
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
