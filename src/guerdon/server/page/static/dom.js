/** Creates elements; texts become text nodes, so a client's data is never parsed as markup (XSS). */

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Creates an HTML element; null and false attributes are omitted, `on...` are listeners. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Creates an SVG element in the same way. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Returns the element with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Replaces the text if it differs; an unchanged live region must not be announced again. */
export function putText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
