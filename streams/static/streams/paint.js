// @ts-check
// The only writer of the run's log on screen. Text waits for a frame (one write a frame, with a timer beneath for
// background tabs, where frames hardly come); calls, cards, marks and ends never wait.

import { el } from './dom.js';
import { visible, warnings } from './safetext.js';
import { NotJson, parseExact, printExact } from './exactjson.js';
import { ExactNumber } from './protocol.js';

/** @typedef {import('./fold.js').Fold} Fold */
/** @typedef {import('./fold.js').Item} Item */
/** @typedef {import('./fold.js').TextItem} TextItem */

/** Longest wait of text for a frame that doesn't come. */
const FRAME_TIMER_MS = 250;
/** How near to the end a reader must be for the page to follow it. */
const FOLLOW_PX = 120;

/** A result as text: strings as they are, all else as JSON with its own digits. @param {unknown} value @returns {string} */
export function shown(value) {
  if (typeof value === 'string') return value;
  return JSON.stringify(value, (_key, inner) => (inner instanceof ExactNumber ? `\u0000${inner.source}\u0000` : inner), 2)?.replace(/"\\u0000([^"]*)\\u0000"/g, '$1') ?? '';
}

/** @param {string} text JSON or not @returns {string} */
export function prettyJson(text) {
  try {
    return printExact(parseExact(text));
  } catch (fault) {
    if (fault instanceof NotJson) return text;
    throw fault;
  }
}

export class Painter {
  /** @param {HTMLElement} root @param {(actionId: string) => HTMLElement} card makes the element of an action, once */
  constructor(root, card) {
    this.root = root;
    this.card = card;
    this.writes = 0;
    /** @type {Map<string, {item: Item, node: HTMLElement, text: Text | null}>} */
    this.painted = new Map();
    /** @type {readonly Item[]} */
    this.wanted = [];
    /** @type {readonly Item[]} */
    this.order = [];
    this.scheduled = false;
    this.flush = this.flush.bind(this);
  }

  /** Show this fold: at once when anything but text changed, else in the next frame. @param {Fold} fold */
  paint(fold) {
    if (fold.items === this.wanted) return;
    this.wanted = fold.items;
    if (this.needsNow()) this.flush();
    else if (!this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(this.flush);
      setTimeout(this.flush, FRAME_TIMER_MS);
    }
  }

  needsNow() {
    if (this.wanted.length < this.order.length) return true;
    return this.wanted.some((item, index) => {
      const before = this.order[index];
      return before !== item && (item.kind !== 'text' || item.struck || (before !== undefined && before.key !== item.key));
    });
  }

  flush() {
    this.scheduled = false;
    if (this.wanted === this.order) return;
    const follow = document.documentElement.scrollHeight - window.scrollY - window.innerHeight < FOLLOW_PX && this.order.length > 0;
    const keep = new Set(this.wanted.map((item) => item.key));
    for (const [key, { node }] of this.painted) {
      if (keep.has(key)) continue;
      node.remove();
      this.painted.delete(key);
    }
    /** @type {HTMLElement | null} */
    let last = null;
    for (const item of this.wanted) {
      const known = this.painted.get(item.key);
      if (known?.item === item) {
        last = known.node;
        continue;
      }
      if (known && item.kind === 'text' && known.item.kind === 'text' && known.text && known.item.struck === item.struck) {
        this.grow(known.text, item);
        known.node.classList.toggle('closed', item.closed);
        known.item = item;
        last = known.node;
        continue;
      }
      const made = this.make(item);
      if (known) known.node.replaceWith(made.node);
      else if (last) last.after(made.node);
      else this.root.prepend(made.node);
      this.painted.set(item.key, { item, ...made });
      last = made.node;
    }
    this.order = this.wanted;
    this.writes += 1;
    if (follow && !location.hash) window.scrollTo({ top: document.documentElement.scrollHeight });
  }

  /** @param {Text} node @param {TextItem} item */
  grow(node, item) {
    const text = visible(item.text, { lines: true, emoji: true });
    if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
    else node.data = text;
  }

  /** @param {Item} item @returns {{node: HTMLElement, text: Text | null}} */
  make(item) {
    const id = `e${item.offset}`;
    switch (item.kind) {
      case 'text': {
        const text = document.createTextNode(visible(item.text, { lines: true, emoji: true }));
        const tag = item.struck ? 'del' : 'div';
        const node = el(tag, { class: `block${item.closed ? ' closed' : ''}`, id, dir: 'auto', 'data-kind': 'text' }, text);
        return { node, text };
      }
      case 'action':
        return { node: this.card(item.actionId), text: null };
      case 'mark':
        return { node: el('div', { class: 'mark', id, 'data-kind': 'mark' }, el('span', {}, visible(item.words))), text: null };
      case 'done':
        return { node: el('div', { class: 'mark', id, 'data-kind': 'done' }, el('span', {}, `End of the log: ${visible(item.reason)}`)), text: null };
      case 'call':
        return { node: this.box(item, id, 'Call', item.name, prettyJson(item.arguments)), text: null };
      case 'result':
        return { node: this.box(item, id, item.isError ? 'Refused or failed' : 'Result', item.tool, shown(item.result)), text: null };
      case 'error':
        return { node: this.box(item, id, item.recoverable ? 'Error, trying again' : 'Error', item.code, item.message), text: null };
    }
  }

  /** @param {Item} item @param {string} id @param {string} word @param {string} name @param {string} body */
  box(item, id, word, name, body) {
    const bad = item.kind === 'error' || (item.kind === 'result' && item.isError);
    const said = warnings(name + body);
    const shownBody = el('pre', { dir: 'ltr', tabindex: '0' }, visible(body, { lines: true }));
    const open = item.kind === 'error' || (item.kind === 'result' && body.length < 300);
    const peek = open ? null : el('code', { class: 'peek', dir: 'ltr' }, visible(body.replace(/\s+/g, ' ').slice(0, 120)));
    const head = el('summary', {}, el('span', { class: 'word' }, word), name ? el('code', {}, visible(name)) : null, item.struck ? el('span', { class: 'note' }, 'superseded') : null, peek);
    const details = el('details', { class: 'fold', ...(open ? { open: '' } : {}) }, head, ...said.map((words) => el('p', { class: 'warn' }, words)), shownBody);
    return el('section', { class: `box ${item.kind}${bad ? ' bad' : ''}${item.struck ? ' struck' : ''}`, id, 'data-kind': item.kind }, details);
  }
}
