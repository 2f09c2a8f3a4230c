// Elements without a framework: text always goes in as text, so a class name can never be markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

// Radio buttons in a row; `chosen` is told the value as it was given.
export function choices(place, name, values, current, text, chosen) {
  fill(place, ...values.map((value) => {
    const input = make("input", { type: "radio", name, value: String(value), onchange: () => chosen(value) });
    input.checked = value === current;
    return make("label", {}, input, make("span", {}, text(value)));
  }));
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
export const percent = (share) => `${Number((100 * share).toPrecision(4))} %`;

// Small pictures are shown pixel by pixel, photographs are not.
export function sharpness(image, shape) {
  image.classList.toggle("smooth", Math.max(shape[1], shape[2]) >= 96);
}
