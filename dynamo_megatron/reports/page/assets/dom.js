"use strict";
// What every part of the page uses. Texts of the run reach the document as text nodes only, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);

// Distinct also for the colour-blind (Okabe and Ito).
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000"];
const BLUE = [0, 114, 178], ORANGE = [213, 94, 0];
const DASHES = ["solid", "dash", "dot", "dashdot"];

// make("p", {class: "note"}, "text", node, ...): an element with attributes (functions are event listeners).
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function table(head, rows) {
  const cells = (row, tag) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell)));
  return make("div", {class: "scroll"},
    make("table", {}, make("thead", {}, cells(head, "th")), make("tbody", {}, ...rows.map((row) => cells(row, "td")))));
}

// Control characters, line separators and what turns the direction of writing, as escapes.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

function shortened(text, length) {
  const line = visible(text).replace(/\s+/g, " ");
  return line.length > length ? line.slice(0, length) + "…" : line;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
}

function percent(value) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %";
}

// For texts that Plotly would read as its own kind of HTML.
function escaped(text) {
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// A colour between white and `colour`, which stays light enough for black text.
function tint(colour, share) {
  const s = 0.7 * Math.max(0, Math.min(1, share));
  return `rgb(${colour.map((c) => Math.round(255 + s * (c - 255))).join(",")})`;
}

// What a reader has set for these runs, kept over a reload; a browser that forbids storage forgets it.
const KEPT = "dynamo-megatron/" + DATA.runs.map((run) => run.folder).join("\n") + "\n";

function remember(key, value) {
  try { localStorage.setItem(KEPT + key, JSON.stringify(value)); } catch (error) { /* not allowed here */ }
}

function remembered(key, otherwise) {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT + key));
    return found === null ? otherwise : found;
  } catch (error) { return otherwise; }
}

function select(name, options, value, change) {
  const made = make("select", {change: (event) => change(event.target.value)},
    ...options.map(([key, text, disabled]) => make("option", {value: key, disabled, selected: key === value}, text)));
  return make("label", {}, name, made);
}
