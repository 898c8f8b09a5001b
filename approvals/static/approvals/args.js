// @ts-check
// What will run, shown whole: every field with its exact value, what is long folded with a count, and known whether
// everything has been opened.

import { el } from '../streams/dom.js';
import { NotJson, leavesOf, parseExact, printExact } from '../streams/exactjson.js';
import { visible, warnings } from '../streams/safetext.js';

const LONG = 400;
const FIELDS = 40;

/**
 * @typedef {{node: HTMLElement, complete: () => boolean, open: () => void}} Shown
 */

/**
 * @param {string} text canonical JSON @param {() => void} [opened] called when a fold was opened
 * @returns {Shown}
 */
export function showArguments(text, opened = () => {}) {
  /** @type {Set<HTMLButtonElement>} */
  const closed = new Set();
  /** @param {string} label @param {() => void} reveal */
  const fold = (label, reveal) => {
    const button = el('button', { type: 'button', class: 'fold-button' }, label);
    closed.add(button);
    button.addEventListener('click', () => {
      if (!closed.delete(button)) return;
      reveal();
      button.remove();
      opened();
    });
    return button;
  };
  /** @param {string} value */
  const valueNode = (value) => {
    const seen = visible(value, { lines: true });
    const code = el('code', { class: 'value', dir: 'ltr' });
    if (seen.length <= LONG) {
      code.append(seen);
      return code;
    }
    // Both ends are shown: what is hidden in the middle is said in numbers.
    const head = document.createTextNode(seen.slice(0, LONG / 2));
    code.append(head);
    code.append(fold(`Show ${seen.length - LONG / 2} more characters`, () => {
      head.data = seen;
    }));
    return code;
  };

  const node = el('div', { class: 'args' });
  for (const words of warnings(text.replace(/\\u[0-9a-f]{4}/gi, (escape) => String.fromCharCode(parseInt(escape.slice(2), 16))))) node.append(el('p', { class: 'warn' }, words));
  /** @type {Array<[string, string]>} */
  let fields;
  try {
    const parsed = parseExact(text);
    fields = [...leavesOf(parsed)];
    if (parsed.kind === 'object' && parsed.entries.length === 0) fields = [];
  } catch (fault) {
    if (!(fault instanceof NotJson)) throw fault;
    node.append(el('p', { class: 'warn' }, `Not JSON: ${fault.message}`), el('pre', {}, visible(text, { lines: true })));
    return { node, complete: () => true, open: () => {} };
  }
  if (fields.length === 0) node.append(el('p', { class: 'note' }, 'No arguments'));
  const table = el('dl', { class: 'fields' });
  /** @param {[string, string]} field */
  const row = ([path, value]) => [el('dt', {}, el('bdi', {}, visible(path || '(value)'))), el('dd', {}, valueNode(value))];
  table.append(...fields.slice(0, FIELDS).flatMap(row));
  node.append(table);
  if (fields.length > FIELDS) {
    const rest = fields.slice(FIELDS);
    node.append(fold(`Show ${rest.length} more fields`, () => table.append(...rest.flatMap(row))));
  }
  const exact = el('pre', { tabindex: '0' }, visible(printExact(parseExact(text)), { lines: true }));
  node.append(el('details', { class: 'fold' }, el('summary', {}, 'Exact JSON'), exact));
  return {
    node,
    complete: () => closed.size === 0,
    open: () => {
      while (closed.size > 0) for (const button of [...closed]) button.click();
    },
  };
}
