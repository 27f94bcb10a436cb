"use strict";
// An agent's rollout as a conversation: texts of the agent, and answers as their tokens.

function aboutTurn(view, k) {
  const turn = view.episode.turns[k], versions = view.values.version.slice(turn.first, turn.first + turn.count);
  const steps = [...new Set(versions)].sort((a, b) => a - b).map((v) => (v < 0 ? "unknown" : String(v)));
  const weights = steps.length ? `, weights of step ${steps.join(", ")}` : "";
  const trained = ["failed", "rejected"].includes(view.status) ? "not trained" : "trained";
  return `answer ${k + 1} of ${view.episode.turns.length}: ${number(turn.asked)} to ${number(turn.answered)} s${weights}, ${turn.count} tokens, ${trained}`;
}

function said(role, about, content, style) {
  return make("div", {class: "said", "data-role": role},
    make("p", {class: "who"}, make("b", {}, role), about ? " " + about : ""), make("div", {class: "box text " + style}, ...content));
}

// `spans(first, count)`: the elements of these tokens of the response.
function conversationOf(view, spans) {
  const {turns, conversation, others} = view.episode;
  const answer = (k) => said("assistant", aboutTurn(view, k), spans(turns[k].first, turns[k].count), "tokens");
  const written = (role) => (role === "assistant" && turns.length ? "as the agent wrote it, not trained" : "");
  const parts = conversation.map((message) => (message.turn !== null ? answer(message.turn)
    : said(visible(message.role), written(message.role), [visible(message.text)], "")));
  if (conversation.length && others.length) parts.push(make("h3", {}, "Answers in other conversations of this episode"));
  for (const other of others) {
    if (other.before) parts.push(said("before it", `in segment ${other.segment + 1}, not trained`, [visible(other.before)], ""));
    parts.push(answer(other.turn));
  }
  return parts;
}
