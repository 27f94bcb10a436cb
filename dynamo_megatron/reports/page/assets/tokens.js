"use strict";
// A rollout as text, each token coloured by what the run's files say of it.

// `signed`: blue below `middle`, orange above; else white to blue from the lowest to the highest.
const KINDS = [
  {key: "advantage", name: "advantage", unit: "", signed: true, middle: 0},
  {key: "entropy", name: "entropy of the policy", unit: "nats"},
  {key: "modulation", name: "modulation: boosted, damped", unit: "factor", signed: true, middle: 1},
  {key: "gap", name: "gap, policy - engine", unit: "nats", signed: true, middle: 0},
  {key: "surprise", name: "surprise, -logprob of the engine", unit: "nats"},
  {key: "version", name: "version of the weights", unit: "", classes: true},
];

// A number for every token shown, or null where the files have none.
function valuesOf(view, key) {
  if (key === "surprise") return view.values.engine_logprob.map((v) => (v === null ? null : -v));
  const values = view.values[key];
  if (values === undefined) return null;
  return Array.isArray(values) ? values : view.ids.map(() => values);
}

function scaleOf(kind, values) {
  const known = values.filter((v) => v !== null);
  if (kind.classes) {
    const versions = [...new Set(known)].sort((a, b) => a - b);
    const rgb = (v) => COLOURS[versions.indexOf(v) % 6].match(/[0-9a-f]{2}/g).map((h) => parseInt(h, 16));
    return {versions, colour: (v) => tint(rgb(v), 0.7)};
  }
  const low = Math.min(...known), high = Math.max(...known);
  if (kind.signed) {
    const reach = Math.max(Math.abs(low - kind.middle), Math.abs(high - kind.middle)) || 0.1;
    return {low: kind.middle - reach, high: kind.middle + reach,
      colour: (v) => tint(v < kind.middle ? BLUE : ORANGE, Math.abs(v - kind.middle) / reach)};
  }
  return {low, high, colour: (v) => tint(BLUE, high > low ? (v - low) / (high - low) : 0)};
}

function legendOf(kind, scale) {
  const unit = kind.unit ? " " + kind.unit : "";
  if (kind.classes) return make("div", {class: "legend"}, ...scale.versions.map((version) => {
    const swatch = make("span", {class: "swatch"});
    swatch.style.background = scale.colour(version);
    return make("span", {}, swatch, version < 0 ? "unknown" : `weights of step ${version}`);
  }));
  const bar = make("span", {class: "bar"}), stops = [0, 0.25, 0.5, 0.75, 1];
  bar.style.background = `linear-gradient(to right, ${stops.map((s) => scale.colour(scale.low + s * (scale.high - scale.low))).join(",")})`;
  const said = {advantage: " (blue: made less likely, orange: more likely)", modulation: " (blue: damped, orange: boosted, white: 1)",
    gap: " (blue: the policy gives less than the engine, orange: more)"}[kind.key] || "";
  return make("div", {class: "legend"}, number(scale.low, 3) + unit, bar, number(scale.high, 3) + unit, said);
}

function tokenText(view, i) {
  return view.texts === null ? `[${view.ids[i]}]` : view.texts[i];
}

function aboutToken(view, i) {
  const parts = [`token ${i + 1} of ${view.length}`, `id ${view.ids[i]}`, `text ${JSON.stringify(visible(tokenText(view, i)))}`];
  const engine = view.values.engine_logprob[i];
  if (engine !== null && engine !== undefined) parts.push(`logprob of the engine ${number(engine)} (p ${number(Math.exp(engine), 3)})`);
  for (const kind of KINDS) {
    const values = kind.key === "surprise" ? null : valuesOf(view, kind.key);
    if (values && values[i] !== null) parts.push(`${kind.key} ${number(values[i])}${kind.unit ? " " + kind.unit : ""}`);
  }
  return parts.join(", ");
}

function numbersTable(view) {
  const kinds = ["engine_logprob", "logprob", ...KINDS.map((kind) => kind.key).filter((key) => key !== "surprise")];
  const there = kinds.map((key) => [key, valuesOf(view, key)]).filter(([, values]) => values);
  return table(["token", "id", "text", ...there.map(([key]) => key)], view.ids.map((id, i) =>
    [String(i + 1), String(id), JSON.stringify(visible(tokenText(view, i))), ...there.map(([, values]) => number(values[i], 5))]));
}

// Of `count` tokens from `first` on.
function tokenSpans(view, values, scale, first, count) {
  return view.ids.slice(first, first + count).map((id, k) => {
    const i = first + k, text = visible(tokenText(view, i));
    const token = make("span", {class: text ? "token" : "token empty", "data-token": i}, text);
    if (values[i] !== null) token.style.background = scale.colour(values[i]);
    return token;
  });
}

function tokensOf(view, kind) {
  if (!view.ids.length) return view.episode ? conversationOf(view, () => []) : [make("p", {}, "No tokens.")];
  const values = valuesOf(view, kind.key), scale = scaleOf(kind, values);
  const about = make("p", {class: "about", "aria-live": "polite"}, "Point at a token, or tap it, for its numbers.");
  const spans = (first, count) => tokenSpans(view, values, scale, first, count);
  const tokens = view.episode ? make("div", {id: "tokens"}, ...conversationOf(view, spans))
    : make("div", {class: "box tokens text", id: "tokens"}, ...spans(0, view.ids.length));
  const point = (event) => {
    const place = event.target.closest("[data-token]");
    if (!place) return;
    tokens.querySelectorAll(".marked").forEach((token) => token.classList.remove("marked"));
    place.classList.add("marked");
    about.textContent = aboutToken(view, Number(place.dataset.token));
  };
  tokens.addEventListener("mouseover", point);
  tokens.addEventListener("click", point);
  return [legendOf(kind, scale), ...(view.episode ? [about, tokens] : [tokens, about])];  // a conversation may be long
}

// The whole rollout; `kindKey` is the colour that is asked for, if the rollout has it.
function rolloutDetail(view, kindKey, changeKind) {
  const there = KINDS.filter((kind) => valuesOf(view, kind.key));
  const kind = there.find((each) => each.key === kindKey) || there[0];
  const options = KINDS.map((each) => [each.key, each.name + (there.includes(each) ? "" : " (not known of this rollout)"), !there.includes(each)]);
  const parts = Object.entries(view.parts).map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ");
  const cut = view.ids.length < view.length ? ` The first ${view.ids.length} of ${view.length} tokens are shown.` : "";
  const numbers = make("details", {}, make("summary", {}, "Numbers of all tokens"));
  numbers.addEventListener("toggle", () => { if (numbers.open && numbers.children.length === 1) numbers.append(numbersTable(view)); });
  const counts = view.episode ? Object.entries(view.episode.counts).map(([name, count]) => `${visible(name)} ${count}`).join(", ") : "";
  const prompt = make("div", {class: "box text"}, visible(view.prompt));
  return make("div", {class: "detail", id: "detail"},
    make("h3", {}, `Rollout ${visible(view.id)}, step ${view.step}`),
    make("p", {}, ...view.labels.map((label) => make("span", {class: "tag"}, label))),
    make("p", {}, `reward ${number(view.reward)} (${view.success ? "success" : "no success"})` + (parts ? ` from ${parts}` : "") +
      `; ended by ${visible(view.finish)}, ${view.length} tokens; status ${visible(view.status)}` + (view.server ? `; ${visible(view.server)}` : "")),
    counts ? make("p", {class: "note"}, "episode: " + counts) : null,
    make("h3", {}, `Prompt ${visible(view.prompt_id)}`), view.episode && view.episode.conversation.length ? null : prompt,
    make("div", {class: "controls"}, make("h3", {}, view.episode ? "Conversation" : "Response"), select("colour by", options, kind.key, changeKind)),
    ...tokensOf(view, kind), cut ? make("p", {class: "note"}, cut) : null, numbers,
    view.answer === null ? null : make("div", {}, make("h3", {}, "Reference answer"), make("div", {class: "box text"}, visible(view.answer))));
}
