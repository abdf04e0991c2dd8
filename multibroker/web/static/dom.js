// Small tools for building pages. Text always goes in as text nodes, never as HTML.

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

// Like place.replaceChildren, for places drawn anew every second: whoever is on a link with the
// keyboard stays on it.
export function redraw(place, ...children) {
  const held = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.replaceChildren(...children.flat().filter((child) => child != null));
  if (held) place.querySelector(`[href="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

export function table(caption, columns, rows) {
  const head = columns.map(([label, kind]) => el("th", { scope: "col", class: kind }, label));
  const body = rows.map((cells) => el("tr", {},
    cells.map((cell, index) => el("td", { class: columns[index][1] }, cell))));
  return el("div", { class: "scroll" }, el("table", {},
    caption && el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const number = (value) => NUMBER.format(value);

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${NUMBER.format(value)} ${units[unit]}`;
}

export function age(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const SVG = "http://www.w3.org/2000/svg";

// Lines over the same scale: series is [[class, numbers], ...].
export function spark(label, series, width = 120, height = 36) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const peak = Math.max(1, ...series.flatMap(([, values]) => values));
  for (const [kind, values] of series) {
    const step = width / Math.max(1, values.length - 1);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("class", kind);
    line.setAttribute("points", values.map((value, index) =>
      `${(index * step).toFixed(1)},${(height - 2 - (value / peak) * (height - 4)).toFixed(1)}`).join(" "));
    svg.append(line);
  }
  return svg;
}
