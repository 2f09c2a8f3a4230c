// Curves over the test images: the explorer computes them in the background, the page asks how far it is.

import { post } from "./api.js";
import { chart } from "./chart.js";
import { $, fill, make, percent } from "./dom.js";

let shown = null;
let round = 0;

const pause = (ms) => new Promise((wake) => setTimeout(wake, ms));

export async function update(page) {
  const own = ++round;
  $("curves-result").hidden = true;
  $("curves-progress").hidden = false;
  $("curves-stage").textContent = "starting ...";
  while (own === round) {
    const found = await post("curves", { alpha: page.alpha, draws: page.draws });
    if (own !== round) return;
    if (found.state === "failed") throw new Error(found.message);
    if (found.methods) {
      shown = found;
      $("curves-result").hidden = false;
      draw(page);
    }
    if (found.state === "done") {
      $("curves-progress").hidden = true;
      return;
    }
    $("curves-stage").textContent = `${found.stage} ...`;
    $("curves-bar").value = found.done / Math.max(found.total, 1);
    await pause(400);
  }
}

export function leave() {
  round += 1;
}

export function draw(page) {
  if (shown === null || $("curves-result").hidden) return;
  const { methods, epsilons, alpha } = shown;
  const span = [epsilons[0], epsilons.at(-1)];  // axes stay while curves come
  const lines = (points, whiskers) => known(page).map((method) => ({
    key: method.key, title: method.title, certified: page.certified(method.key), whiskers, points: points(methods[method.key]),
  }));
  const sizes = lines((row) => row.size.map((point, at) => ({ x: epsilons[at], ...point })), false);
  const most = Math.max(...sizes.flatMap((line) => line.points.map((point) => point.high)));
  chart($("size-chart"), sizes, {
    x: `ε (${page.subject.norm})`, y: "mean labels per set", span, low: 0, high: Math.max(1, most) * 1.06, label: "Mean set size against epsilon; the numbers are in the table below",
  });
  const covered = lines((row) => [...(epsilons[0] === 0 ? [{ x: 0, ...row.clean[0] }] : []), ...row.attacked.map((point) => ({ x: point.radius, ...point }))], true);
  const least = Math.min(1 - alpha, ...covered.flatMap((line) => line.points.map((point) => point.low)));
  chart($("coverage-chart"), covered, {
    x: `ε of the sets and of the attack (${page.subject.norm})`, y: "coverage", span, low: Math.max(0, Math.floor(least * 10) / 10), high: 1.005, goal: 1 - alpha,
    label: "Attacked coverage against epsilon; the numbers are in the table below",
  });
  $("curves-note").textContent =
    `α = ${alpha}, ${shown.draws} draws. Sizes and coverage at ε = 0 on ${shown.images} untouched test images; attacked coverage on the first `
    + `${shown.attacked_images} of them, the worse of PGD on the plain model and SmoothAdv. The dotted line is the promise, ${percent(1 - alpha)}; `
    + "dashed methods promise it for untouched images only. Intervals are 95 %: Clopper-Pearson for coverage, normal for mean sizes. They do not "
    + "include the luck of this one calibration, so a certified curve may dip a little below the line. Sets are running unions over ε, as on the other view.";
  table(page);
}

// Curves are drawn as they come: the methods whose numbers have arrived.
const known = (page) => page.subject.methods.filter((method) => method.key in shown.methods);

const number = (row) => `${row.mean.toFixed(3)} [${row.low.toFixed(3)}, ${row.high.toFixed(3)}]`;

function table(page) {
  const head = make("thead", {}, make("tr", {}, ...["method", "ε", "mean size", "coverage, untouched", "coverage, attacked"].map((text) => make("th", { scope: "col" }, text))));
  const rows = known(page).flatMap((method) => shown.epsilons.map((epsilon, at) => {
    const row = shown.methods[method.key];
    const attacked = row.attacked.find((one) => one.radius === epsilon);
    return make("tr", {}, make("th", { scope: "row" }, method.title), make("td", {}, String(epsilon)), make("td", {}, number(row.size[at])),
      make("td", {}, number(row.clean[at])), make("td", {}, attacked ? number(attacked) : ""));
  }));
  fill($("curves-table"), head, make("tbody", {}, ...rows));
}
