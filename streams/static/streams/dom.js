// @ts-check
// Making elements. Text goes in as text nodes only: no string ever becomes markup here.

/** @typedef {string | Node | null | undefined | false} Child */

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag @param {Record<string, string | boolean | number | undefined>} [attributes] @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/** Write only what changed: a screen reader and a test's counter both notice an idle write. @param {Node} node @param {string} text @returns {boolean} */
export function setText(node, text) {
  if (node.textContent === text) return false;
  node.textContent = text;
  return true;
}

/** @template {Element} T @param {string} selector @param {new () => T} type @param {ParentNode} [root] @returns {T} */
export function need(selector, type, root = document) {
  const found = root.querySelector(selector);
  if (!(found instanceof type)) throw new Error(`the page lacks ${selector}`);
  return found;
}

/** Milliseconds by which the server's clock is ahead of this one, from the page's own time stamp. */
const skewMs = (() => {
  const stamp = document.documentElement.dataset['now'];
  const server = stamp === undefined ? NaN : Date.parse(stamp);
  return Number.isNaN(server) ? 0 : server - Date.now();
})();

/** Now, by the server's clock. */
export function serverNow() {
  return Date.now() + skewMs;
}

/** "3 min", "2 h 5 min": for ages and time left. @param {number} ms */
export function span(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return minutes < 5 ? `${minutes} min ${seconds % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}
