// Elements of the page, and numbers as it writes them.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, options, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

export function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  if (text !== undefined) made.textContent = text;
  return made;
}

export const counted = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export const signed = (value, digits) => value.toFixed(digits).replace("-", "−");
