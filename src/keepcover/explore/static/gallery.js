// The test images, a page at a time, and uploads.

import { picture, upload } from "./api.js";
import { $, fill, make, sharpness } from "./dom.js";

const PER_PAGE = 24;
let at = 0;

const matching = (page) => {
  const wanted = $("class-filter").value;
  return page.subject.labels.flatMap((label, index) => (wanted === "" || label === Number(wanted) ? [index] : []));
};

export function setUp(page) {
  const present = [...new Set(page.subject.labels)].sort((a, b) => a - b);
  $("class-filter").append(...present.map((label) => make("option", { value: label }, page.subject.class_names[label])));
  $("class-filter").addEventListener("change", () => turn(page, -at));
  $("previous").addEventListener("click", () => turn(page, -1));
  $("next").addEventListener("click", () => turn(page, 1));
  $("file").addEventListener("change", () => send(page));
  $("invert").addEventListener("change", () => send(page));
  turn(page, 0);
}

function turn(page, by) {
  const indices = matching(page);
  const pages = Math.max(1, Math.ceil(indices.length / PER_PAGE));
  at = Math.min(Math.max(at + by, 0), pages - 1);
  fill($("gallery"), ...indices.slice(at * PER_PAGE, (at + 1) * PER_PAGE).map((index) => {
    const name = `g${index}`;
    const image = make("img", { src: picture(name), alt: `Test image ${index}, ${page.subject.class_names[page.subject.labels[index]]}`, loading: "lazy" });
    sharpness(image, page.subject.shape);
    return make("button", { type: "button", "data-image": name, "aria-pressed": String(name === page.image), onclick: () => page.choose(name) }, image);
  }));
  $("page").textContent = `${at + 1} / ${pages}`;
  $("previous").disabled = at === 0;
  $("next").disabled = at === pages - 1;
}

// Mark the image on show, turning to its page where it is on another one.
export function mark(page) {
  if (page.image.startsWith("g")) {
    const indices = matching(page);
    const place = indices.indexOf(Number(page.image.slice(1)));
    if (place >= 0 && Math.floor(place / PER_PAGE) !== at) turn(page, Math.floor(place / PER_PAGE) - at);
  }
  for (const button of $("gallery").children) {
    button.setAttribute("aria-pressed", String(button.dataset.image === page.image));
  }
}

export function caption(page, sets) {
  const names = page.subject.class_names;
  $("chosen").src = picture(sets.image);
  sharpness($("chosen"), page.subject.shape);
  const known = sets.label !== null;
  $("chosen").alt = known ? `Test image ${sets.image.slice(1)}, ${names[sets.label]}` : "Your image as the model sees it";
  fill($("chosen-caption"),
    make("b", {}, known ? names[sets.label] : "your image"), make("br"),
    make("span", { class: "quiet" }, `${known ? `test image ${sets.image.slice(1)}` : "true label unknown"}; the model says ${names[sets.prediction]}`));
}

async function send(page) {
  const file = $("file").files[0];
  if (!file) return;
  await page.during("reading the image ...", async () => {
    $("upload-note").textContent = "";
    const found = await upload(file, $("invert").checked);
    $("upload-note").textContent = found.notices.length
      ? `What the model sees was ${found.notices.join(", ")}. The promise is about that image, and only if it comes from where the test images come from.`
      : "The promise holds only if it comes from where the test images come from.";
    await page.choose(found.image);
  });
}
