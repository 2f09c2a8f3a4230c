// Attack the image on show, or find one that the first method loses.

import { post } from "./api.js";
import { $, choices, fill, make, plural, sharpness } from "./dom.js";

const WORDS = {
  kept: ["label kept", "kept"], lost: ["label lost", "lost"], missed: ["label was not in the set before either", null],
  gained: ["label entered the set", null],
};
const MOST = 8;

export function setUp(page) {
  $("attack-button").addEventListener("click", () => page.during("attacking ...", () => attack(page)));
  $("find-button").addEventListener("click", () => page.during("attacking one image after another ...", () => find(page)));
  $("find-button").textContent = `Find an image that ${page.subject.methods[0].title.replace(/^[A-Z]/, (c) => c.toLowerCase())} loses`;
  fill($("label"), make("option", { value: "" }, "what the model predicts"),
    ...page.subject.class_names.map((name, label) => make("option", { value: label }, name)));
}

// A picture of other settings must not stand beside the sets of these.
export function forget(page) {
  $("attack-result").hidden = true;
  $("attack-note").textContent = "";
  $("label-choice").hidden = page.image.startsWith("g");
  const still = page.epsilon() === 0;
  for (const id of ["attack-button", "find-button"]) $(id).disabled = still;
  if (still) $("attack-note").textContent = "At ε = 0 an attacker may change nothing: move ε up.";
}

const levels = (page) => ({ alpha: page.alpha, draws: page.draws, epsilon: page.epsilon() });

async function attack(page, before = "") {
  const label = page.image.startsWith("u") && $("label").value !== "" ? Number($("label").value) : null;
  const asked = page.state();
  const found = await post("attack", { ...levels(page), image: page.image, label });
  if (asked !== page.state()) return;  // the controls were moved while it ran
  show(page, found, before);
}

async function find(page) {
  const after = page.image.startsWith("g") ? Number(page.image.slice(1)) : -1;
  const asked = page.state();
  const found = await post("find", { ...levels(page), after });
  if (asked !== page.state()) return;
  if (found.index === null) {
    $("attack-note").textContent = `None: of ${plural(found.tried, "image")} none was lost at this ε.`;
    return;
  }
  await page.choose(`g${found.index}`);
  await attack(page, `Chosen because it is lost: number ${found.tried} of those tried. `);
}

function show(page, found, before) {
  const name = page.subject.class_names[found.label];
  $("attack-note").textContent = `${before}Driving out “${name}”, ${found.label_source}, within ε = ${found.epsilon}.`
    + (page.subject.gradients ? "" : " The model gives no gradients, so the search goes by queries alone and is weak.");
  $("attack-result").hidden = false;
  for (const id of ["original", "attacked", "difference"]) sharpness($(id), page.subject.shape);
  $("original").src = found.original;
  $("original").alt = "The image as it was";
  const titles = Object.fromEntries(found.attempts.map((one) => [one.aim, one.title]));
  const worst = found.attempts.find((one) => Object.values(one.fates).includes("lost")) ?? found.attempts[0];
  choices($("aim"), "aim", found.attempts.map((one) => one.aim), worst.aim, (aim) => titles[aim],
    (aim) => pictures(found.attempts.find((one) => one.aim === aim)));
  pictures(worst);
  fates(page, found);
}

function pictures(one) {
  $("attacked").src = one.attacked;
  $("attacked").alt = `The image after: ${one.title}`;
  $("attacked-caption").textContent = `attacked: moved by ${one.reach}, no pixel by more than ${one.largest_change.toFixed(3)}`;
  $("difference").src = one.difference;
  $("difference").alt = "The difference, amplified; middle grey is no change";
  $("difference-caption").textContent = `difference, ${one.gain.toFixed(1)} times amplified; grey is no change`;
}

function fates(page, found) {
  const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "method"),
    ...found.attempts.map((one) => make("th", { scope: "col" }, one.title))));
  const rows = page.subject.methods.map((method) => make("tr", { "data-method": method.key },
    make("th", { scope: "row" }, method.title),
    ...found.attempts.map((one) => {
      const [words, kind] = WORDS[one.fates[method.key]];
      return make("td", { "data-aim": one.aim, "data-fate": one.fates[method.key] }, make("span", { class: kind }, words), make("br"),
        make("span", { class: "quiet" }, set(page, one.after[method.key])));
    })));
  fill($("fates"), head, make("tbody", {}, ...rows));
}

function set(page, labels) {
  const all = page.subject.class_names;
  if (labels.length === all.length) return "trivial set: every label";
  if (labels.length === 0) return "empty set";
  const names = labels.slice(0, MOST).map((label) => all[label]).join(", ");
  return labels.length > MOST ? `${names} and ${labels.length - MOST} more` : names;
}
