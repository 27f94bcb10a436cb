"use strict";
// The parts of the page, each made when it is first shown.

const PARTS = {overview: showOverview, allocation: showAllocation, rollouts: showRollouts, pairs: showPairs};

const EMPTY = [...(DATA.pairs.shown.length ? [] : ["pairs"]), ...(DATA.runs.some((run) => run.rollouts.shown.length) ? [] : ["rollouts"])];

function show() {
  const [asked, ...rest] = location.hash.slice(1).split("/"), name = Object.hasOwn(PARTS, asked) && !EMPTY.includes(asked) ? asked : "overview";
  for (const part of Object.keys(PARTS)) document.getElementById("part-" + part).hidden = part !== name;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === "#" + name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const place = document.getElementById("part-" + name);
  if (!place.dataset.made) { place.dataset.made = "yes"; PARTS[name](place); }
  setTimeout(drawPending);
  if (name === "rollouts" && rest.length) window.openRollout(decoded(rest.join("/")));
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch (error) { return text; }  // typed by hand, such as %
}

// While a run goes on, `report --watch` writes this file again and again.
function refreshes(place) {
  const box = make("input", {type: "checkbox", checked: remembered("refresh", true), change: () => remember("refresh", box.checked)});
  place.append(" ", make("label", {}, box, ` read this file again every ${number(DATA.refresh)} s`));
  const busy = () => !box.checked || !document.getElementById("part-pairs").hidden || (document.activeElement && document.activeElement.matches("input[type=search], select"));
  setInterval(() => { if (!busy()) location.reload(); }, 1000 * DATA.refresh);
}

function start() {
  const runs = DATA.runs, made = document.getElementById("made");
  document.getElementById("title").textContent = runs.map((run) => visible(run.name)).join(", ");
  document.title = "Report: " + document.getElementById("title").textContent;
  made.textContent = runs.map((run) => `${visible(run.folder)}: ${run.step} of ${run.steps} steps, ${visible(run.model)} on ${visible(run.data)}, ` +
    `allocator ${visible(run.allocator)}, advantage ${visible(String(run.advantage))}${run.modulation ? ", modulation" : ""}`).join("; ") + `. Written ${DATA.made}.` +
    (DATA.left_out.length ? ` Not in this file, which has at most ${runs.length} runs: ${DATA.left_out.map(visible).join(", ")}.` : "");
  for (const part of EMPTY) document.querySelector(`#tabs a[href="#${part}"]`).remove();
  if (DATA.refresh) refreshes(made);
  window.addEventListener("hashchange", show);
  show();
  document.body.dataset.ready = "yes";
}

start();
