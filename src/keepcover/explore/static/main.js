// The page's state and how its parts are told of changes.

import { get, post } from "./api.js";
import * as attack from "./attack.js";
import * as curves from "./curves.js";
import { $, choices, fill, make, plural } from "./dom.js";
import * as gallery from "./gallery.js";
import * as sets from "./sets.js";

const page = {
  subject: null, image: "g0", alpha: null, draws: null, step: 0, found: null, controller: null,

  epsilon: () => page.subject.epsilons[page.step],
  state: () => [page.image, page.alpha, page.draws, page.step].join(" "),
  certified: (key) => page.found?.methods[key].certified ?? true,

  async choose(name) {
    page.image = name;
    gallery.mark(page);
    attack.forget(page);
    await look();
  },

  // Run something that takes a moment: say so, and say what went wrong.
  async during(words, work) {
    problem(null);
    const buttons = [$("attack-button"), $("find-button")];
    for (const button of buttons) button.disabled = true;
    $("attack-note").textContent = words;
    try {
      await work();
    } catch (error) {
      problem(error);
    } finally {
      for (const button of buttons) button.disabled = page.epsilon() === 0;
      if ($("attack-note").textContent === words) $("attack-note").textContent = "";
    }
  },
};

function problem(error) {
  if (error?.name === "AbortError") return;
  $("problem").hidden = !error;
  $("problem").textContent = error ? `${error.message[0].toUpperCase()}${error.message.slice(1)}` : "";
}

async function look() {
  page.controller?.abort();
  const controller = page.controller = new AbortController();
  const slow = setTimeout(() => wait(controller), 250);
  try {
    const found = await post("sets", { image: page.image, alpha: page.alpha, draws: page.draws }, controller.signal);
    page.found = found;
    gallery.caption(page, found);
    sets.draw(page.subject, found, page.step);
    promises();
    problem(null);
  } catch (error) {
    problem(error);
  } finally {
    clearTimeout(slow);
    if (page.controller === controller) {
      page.controller = null;
      $("cards").classList.remove("waiting");
    }
  }
}

// The first look at an alpha or a number of draws calibrates: say how far it is.
async function wait(controller) {
  $("cards").classList.add("waiting");
  while (page.controller === controller) {
    const state = await get("progress").catch(() => ({}));
    if (page.controller !== controller) return;
    const share = state.total ? ` ${Math.round((100 * state.done) / state.total)} % of the noisy images` : "";
    $("summary").textContent = state.what ? `${state.what} ...${share}` : "working ...";
    await new Promise((wake) => setTimeout(wake, 300));
  }
}

function controls() {
  const { subject } = page;
  const slider = $("epsilon");
  slider.max = subject.epsilons.length - 1;
  slider.value = page.step;
  slider.disabled = subject.epsilons.length === 1;
  $("norm").textContent = subject.norm;
  $("epsilon-low").textContent = subject.epsilons[0];
  $("epsilon-high").textContent = subject.epsilons.at(-1);
  const say = () => {
    $("epsilon-value").textContent = page.epsilon();
    slider.setAttribute("aria-valuetext", `epsilon ${page.epsilon()}`);
  };
  slider.addEventListener("input", () => {
    page.step = Number(slider.value);
    say();
    attack.forget(page);
    if (page.found) {
      sets.draw(subject, page.found, page.step);
      promises();
    }
  });
  say();
  const changed = (name) => (value) => {
    page[name] = value;
    attack.forget(page);
    look();
    if (location.hash === "#curves") route();
  };
  choices($("alpha"), "alpha", subject.alphas, page.alpha, String, changed("alpha"));
  choices($("draws"), "draws", subject.draws, page.draws, String, changed("draws"));
  $("control-note").textContent =
    `${subject.noise} is fixed: the model was trained for it. The promise is for an α and ε you choose beforehand; `
    + "one picked by looking at this image's sets is not covered.";
  $("controls").hidden = false;
}

function promises() {
  const { subject, found, step } = page;
  if (!found) return;
  fill($("promise-list"), ...subject.methods.flatMap((method) => {
    const own = found.methods[method.key];
    const words = own.certified
      ? " Proved for the rule as it runs, Monte Carlo noise included."
      : " An attacker can empty its sets of the truth; the curves show how fast.";
    return [make("dt", { class: method.key }, `${method.title} `, make("span", { class: `badge ${own.certified ? "yes" : "no"}` }, own.certified ? "certified" : "not certified")),
      make("dd", {}, own.promises[step] + words + (own.full[step] ? " With these draws and points it can only return every label: a trivial set." : ""))];
  }));
}

function standing() {
  const { subject } = page;
  const { points } = subject;
  $("about").textContent = `${subject.name[0].toUpperCase()}${subject.name.slice(1)}: ${plural(subject.class_names.length, "class").replace(/classs$/, "classes")}, `
    + `images ${subject.shape[2]} × ${subject.shape[1]}, ${subject.noise}`
    + (points.calibration ? `, ${points.holdout} holdout and ${points.calibration} calibration points` : "") + `, ${points.gallery} test images on show`;
  fill($("assumptions"), ...subject.assumptions.map((text) => make("li", {}, text)));
  const own = [
    "The explorer draws each image's noise once, from a fixed seed, so that sets do not flicker and are nested as ε moves. A deployed predictor draws fresh noise for every query, which is what the promise needs: an attacker who can guess the noise is not covered.",
    "Moving the controls and looking again is exploring. For a promise, fix α, ε and the number of draws before you look.",
    "The promise is about a share of queries, not about the image on show, and for images like the test images; an upload has none.",
    "Everything runs on this machine; the page loads nothing from outside it and sends nothing there. Uploads stay in memory until the explorer ends.",
    ...subject.notes,
    `keepcover ${subject.version}.`,
  ];
  fill($("of-this-page"), ...own.map((text) => make("li", {}, text)));
}

function route() {
  const view = ["#curves", "#promise"].includes(location.hash) ? location.hash.slice(1) : "image";
  for (const name of ["image", "curves", "promise"]) {
    $(`view-${name}`).hidden = name !== view;
    if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
    else $(`to-${name}`).removeAttribute("aria-current");
  }
  $("epsilon-control").hidden = view === "curves";  // the curves show every epsilon
  if (view === "curves") curves.update(page).catch(problem);
  else curves.leave();
}

async function start() {
  try {
    page.subject = await get("subject");
  } catch (error) {
    $("about").textContent = "";
    problem(error);
    return;
  }
  const { default: usual } = page.subject;
  page.alpha = usual.alpha;
  page.draws = usual.draws;
  page.step = page.subject.epsilons.indexOf(usual.epsilon);
  standing();
  controls();
  gallery.setUp(page);
  attack.setUp(page);
  window.addEventListener("hashchange", () => { problem(null); route(); });
  let resize = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resize);
    resize = setTimeout(() => curves.draw(page), 150);
  });
  route();
  await page.choose("g0");
  document.body.dataset.ready = "yes";
}

start();
