// A line chart as inline SVG, drawn to the width it has.

import { fill, make } from "./dom.js";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function ticks(low, high, most) {
  const span = high - low || 1;
  const raw = span / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9; at += step) found.push(Number(at.toPrecision(6)));
  return found;
}

// lines: [{key, title, certified, points: [{x, mean, low, high}], whiskers}]
export function chart(place, lines, { x, y, span, low, high, goal = null, label }) {
  const width = Math.max(place.clientWidth, 260), height = Math.min(340, Math.max(220, width * 0.45));
  const left = 44, right = 12, top = 12, bottom = 42;
  const [first, last] = span;
  const across = (value) => left + ((value - first) / (last - first || 1)) * (width - left - right);
  const up = (value) => height - bottom - ((Math.min(Math.max(value, low), high) - low) / (high - low)) * (height - top - bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  for (const at of ticks(low, high, 5)) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: up(at), y2: up(at) }),
      svg("text", { x: left - 7, y: up(at) + 4, "text-anchor": "end" }, String(at)));
  }
  for (const at of ticks(first, last, width < 480 ? 4 : 8)) {
    drawing.append(svg("text", { x: across(at), y: height - bottom + 17, "text-anchor": "middle" }, String(at)));
  }
  drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
    svg("text", { transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y));
  if (goal !== null) drawing.append(svg("line", { class: "goal", x1: left, x2: width - right, y1: up(goal), y2: up(goal) }));
  for (const line of lines) drawing.append(one(line, across, up));
  fill(place, drawing, legend(lines));
}

function one(line, across, up) {
  const group = svg("g", { class: line.key });
  const path = line.points.map((point) => `${across(point.x).toFixed(1)},${up(point.mean).toFixed(1)}`);
  if (line.whiskers) {
    for (const point of line.points) {
      group.append(svg("line", { class: "whisker", x1: across(point.x), x2: across(point.x), y1: up(point.low), y2: up(point.high) }));
    }
  } else {
    const back = [...line.points].reverse();
    const edge = [...line.points.map((p) => [p.x, p.high]), ...back.map((p) => [p.x, p.low])];
    group.append(svg("polygon", { class: "band", points: edge.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ") }));
  }
  group.append(svg("polyline", { class: `line ${line.certified ? "" : "uncertified"}`, points: path.join(" ") }));
  for (const point of line.points) {
    const dot = svg("circle", { class: "dot", cx: across(point.x), cy: up(point.mean), r: 3.6 });
    dot.append(svg("title", {}, `${line.title}, ε ${point.x}: ${point.mean.toFixed(3)} [${point.low.toFixed(3)}, ${point.high.toFixed(3)}]`));
    group.append(dot);
  }
  return group;
}

function legend(lines) {
  return make("ul", { class: "legend" }, ...lines.map((line) => make("li", { class: line.key },
    svg("svg", { viewBox: "0 0 36 12", "aria-hidden": "true" },
      svg("line", { class: `line ${line.certified ? "" : "uncertified"}`, x1: 1, x2: 35, y1: 6, y2: 6 })),
    `${line.title}${line.certified ? "" : " (not certified)"}`)));
}
