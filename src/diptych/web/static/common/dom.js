/** Building and finding elements. Text is always text: nothing here parses HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("button.small", {type: "button", onclick}, "text", child). Names after "." are classes. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, attributes, children);
}

/** The first element that matches. */
export const $ = (selector, root = document) => root.querySelector(selector);

/** Replace the children of an element. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only when it differs: no layout for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(element, classes, attributes, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** State in the query of the address: read it, and write it without a new entry in the history. */
export function queryState() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

export function setQueryState(changes) {
  history.replaceState(null, "", location.pathname + changedQuery(location.search, changes) + location.hash);
}

/** A query with other values; null, undefined and "" take a name out of it. */
export function changedQuery(search, changes) {
  const query = new URLSearchParams(search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  return query.size ? `?${query}` : "";
}

/** Say something to people who do not see the page. */
export function announce(text) {
  let region = document.getElementById("announcements");
  if (!region) {
    region = h("div.visually-hidden", { id: "announcements", role: "status", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}
