/** Elements made from data: every text goes in as text, so that nothing a client sent is ever read as markup. */

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

/** An HTML element; attributes that are null or false are left out, `on...` are listeners. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element, likewise. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** The element of the page's own markup with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Puts the children in, and leaves the element alone where it already says the same: live regions stay quiet. */
export function putText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
