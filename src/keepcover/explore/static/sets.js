// The three cards. Everything for every epsilon has arrived already, so the slider only redraws.

import { $, fill, make, plural } from "./dom.js";

const MOST_CHIPS = 24;

export function inside(method, step) {
  return method.enters.flatMap((at, label) => (at !== null && at <= step ? [label] : []));
}

export function draw(subject, sets, step) {
  const cards = subject.methods.map((method) => card(subject, sets, method, step));
  fill($("cards"), ...cards);
  const counts = subject.methods.map((method) => {
    const size = sets.methods[method.key].sizes[step];
    return `${method.title}: ${size === subject.class_names.length ? "trivial set" : plural(size, "label")}`;
  });
  $("summary").textContent = counts.join("  ·  ");
}

function card(subject, sets, method, step) {
  const found = sets.methods[method.key];
  const labels = inside(found, step);
  const draws = method.noisy ? plural(found.draws, "noisy draw") : "1 clean evaluation";
  return make("article", { class: `card ${method.key}`, "data-method": method.key, "aria-label": method.title },
    make("h3", {}, method.title, sets.no_promise
      ? make("span", { class: "badge no" }, "no promise")
      : found.certified
        ? make("span", { class: "badge yes" }, "certified")
        : make("span", { class: "badge no" }, "not certified")),
    chips(subject, sets, labels),
    size(subject, labels.length, draws),
    bars(subject, sets, found, step),
    make("p", { class: "rule" }, `Rule: ${found.rules[step]}.`),
    make("p", { class: "promise" }, sets.no_promise ?? found.promises[step]));
}

function chips(subject, sets, labels) {
  const order = [...labels].sort((a, b) => (b === sets.label) - (a === sets.label) || a - b);
  const items = order.slice(0, MOST_CHIPS).map((label) =>
    make("li", { class: label === sets.label ? "true" : null, "data-label": label }, subject.class_names[label]));
  if (order.length > MOST_CHIPS) items.push(make("li", { class: "more" }, `and ${order.length - MOST_CHIPS} more`));
  return make("ul", { class: "chips", "aria-label": "Set" }, ...items);
}

function size(subject, count, draws) {
  const total = subject.class_names.length;
  const words = count === total
    ? [make("b", {}, "trivial set"), `: all ${total} labels, true but says nothing`]
    : count === 0
      ? [make("b", {}, "empty set"), ": no label fits this well enough; it counts as missed"]
      : [make("b", {}, `${count}`), ` of ${total} labels`];
  return make("p", { class: "size" }, ...words, make("br"), make("span", { class: "quiet" }, draws));
}

function bars(subject, sets, found, step) {
  const rows = sets.shown.map((label, at) => {
    const enters = found.enters[label];
    const held = enters !== null && enters <= step;
    const joined = held && !found.own[step][at];
    const support = Math.min(Math.max(found.support[step][at], 0), 1);
    const track = make("span", { class: "track", "aria-hidden": "true" }, make("i"), make("b"));
    track.style.setProperty("--support", `${100 * support}%`);
    track.style.setProperty("--needed", `${100 * Math.min(Math.max(found.needed[step][at], 0), 1)}%`);
    const name = subject.class_names[label];
    const state = held ? (joined ? "in the set, from a smaller epsilon" : "in the set") : "not in the set";
    return make("li", { class: [held && "in", label === sets.label && "true"].filter(Boolean).join(" ") || null },
      make("span", { class: "name", title: name }, name),
      track,
      make("span", { class: "value" }, support.toFixed(2)),
      make("span", { class: "mark" },
        make("span", { "aria-hidden": "true" }, joined ? "∪" : held ? "✓" : ""),
        make("span", { class: "away" }, `${state}${label === sets.label ? ", the true label" : ""}`)));
  });
  const list = make("ul", { class: "bars", "aria-label": "How well each label fits" }, ...rows);
  if (sets.shown.length < subject.class_names.length) {
    list.append(make("li", { class: "rest" }, `the ${sets.shown.length} likeliest of ${subject.class_names.length} labels`));
  }
  return list;
}
