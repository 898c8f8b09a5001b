// @ts-check
// The inbox: rows that stay under the hand, live words about them, keys for the quick, and a card in a row that was opened.

import { Connection } from '../streams/connection.js';
import { el, need, serverNow, setText, span } from '../streams/dom.js';
import { mergeAction } from '../streams/fold.js';
import { linkOff, reduceLink, silentMs } from '../streams/link.js';
import { visible, warnings } from '../streams/safetext.js';
import { Card, STATE_WORDS } from './card.js';
import { Decisions } from './decision.js';
import { Fetcher } from './fetching.js';
import { isHigh, refusal } from './guards.js';
import { keysOn, wireHelp } from './keys.js';
import { wireNotices } from './notices.js';
import { ago, lastDecision } from './verdict.js';

/** @typedef {import('../streams/protocol.js').Action} Action */

const page = need('#inbox', HTMLElement);
const user = page.dataset['user'] ?? '';
const tab = page.dataset['tab'] ?? 'waiting';
const mayDecide = page.dataset['mayDecide'] === 'true';
const list = need('#rows', HTMLElement);
const template = need('#row-template', HTMLTemplateElement);
const newBar = need('#new-bar', HTMLElement);
const freshness = need('#freshness', HTMLElement);
const polite = need('#polite', HTMLElement);
const batch = need('#batch', HTMLElement);
/** What a row may show of arguments; what is longer must be opened before it can be approved. */
const PREVIEW = 160;
const renderedAt = Date.parse(document.documentElement.dataset['now'] ?? '') || Date.now();
const plainTitle = document.title;

let link = linkOff();
let welcomed = false;
/** @type {Map<string, Row>} */
const rows = new Map();
/** @type {Map<string, Action>} pending ones that came since, not shown yet */
const waitingToShow = new Map();
/** @type {Row | null} */
let selected = null;
/** @type {Record<string, number>} */
let counts = JSON.parse(page.dataset['counts'] ?? '{}');

class Row {
  /** @param {HTMLElement} node @param {Action} action */
  constructor(node, action) {
    this.node = node;
    this.action = action;
    this.shownAt = performance.now();
    /** @type {Card | null} */
    this.card = null;
    this.pick = need('.pick', HTMLInputElement, node);
    this.anchor = need('a.tool', HTMLAnchorElement, node);
    this.message = need('.row-message', HTMLElement, node);
    this.opener = need('.opener', HTMLButtonElement, node);
    this.opened = need('.opened', HTMLElement, node);
    this.opener.addEventListener('click', () => this.toggle());
    this.pick.addEventListener('change', paintBatch);
    node.addEventListener('focusin', () => select(this));
  }

  /** @param {Action} action */
  update(action) {
    const before = this.action;
    if (action.version < before.version) return;
    this.action = mergeAction({ [before.actionId]: before }, action, true)[before.actionId] ?? action;
    this.paint();
    if (this.card) {
      if (this.action.argumentsText === undefined || action.version > before.version) void fetcher.want(action.actionId);
      this.card.update(this.action, isLive());
    }
  }

  paint() {
    const { node, action } = this;
    node.dataset['state'] = action.state;
    node.dataset['risk'] = action.risk ?? 'unknown';
    setText(need('.risk', HTMLElement, node), action.risk ?? 'unknown');
    setText(need('.tool code', HTMLElement, node), visible(action.tool ?? ''));
    this.anchor.href = `/approvals/${encodeURIComponent(action.actionId)}/`;
    const text = action.argumentsText;
    if (text !== undefined) {
      const seen = visible(text);
      setText(need('.line', HTMLElement, node), seen.length > PREVIEW ? `${seen.slice(0, PREVIEW)}… ${seen.length - PREVIEW} more characters` : seen);
      need('.row-warn', HTMLElement, node).hidden = warnings(text + (action.tool ?? '')).length === 0;
    }
    if (action.requestedBy) setText(need('.agent', HTMLElement, node), visible(action.requestedBy.name));
    setText(need('.state', HTMLElement, node), STATE_WORDS[action.state] ?? action.state);
    const last = lastDecision(action);
    if (last && action.state !== 'pending') setText(need('.who', HTMLElement, node), `by ${visible(last.actor.name)} ${ago(last.at, serverNow())}`);
    const closed = action.state !== 'pending' || !mayDecide;
    if (closed) this.pick.checked = false;
    this.pick.disabled = closed && document.activeElement !== this.pick;
    if (!batch.hidden) paintBatch();
    this.tick();
  }

  tick() {
    const { node, action } = this;
    if (action.requestedAt) setText(need('.age', HTMLElement, node), ago(action.requestedAt, serverNow()));
    const left = action.state === 'pending' && action.expiresAt ? Date.parse(action.expiresAt) - serverNow() : NaN;
    const cell = need('.left', HTMLElement, node);
    setText(cell, Number.isNaN(left) ? '' : left <= 0 ? 'time is up' : `${span(left)} left`);
    cell.classList.toggle('urgent', left < 60000);
    this.card?.tick();
  }

  get complete() {
    return this.action.argumentsText !== undefined && visible(this.action.argumentsText).length <= PREVIEW;
  }

  toggle(open = this.opened.hidden) {
    this.opened.hidden = !open;
    this.opener.setAttribute('aria-expanded', String(open));
    setText(this.opener, open ? 'Close' : 'Open');
    if (open && !this.card) {
      this.card = new Card(this.action.actionId, { decide: (id, wish) => void decisions.decide(id, wish), mayDecide, user, link: true });
      this.card.follow(decisions.kept(this.action.actionId));
      this.opened.append(this.card.node);
      this.card.update(this.action, isLive());
      void fetcher.want(this.action.actionId);
    }
  }
}

const decisions = new Decisions(user, (click, action) => {
  const row = rows.get(click.actionId);
  if (!row) return;
  row.card?.follow(click);
  row.message.dataset['tone'] = click.tone;
  setText(row.message, click.step === 'recorded' || click.step === 'refused' || click.step === 'sent' || click.step === 'signed_out' ? click.message : '');
  if (action) row.update(action);
});
const fetcher = new Fetcher((action) => {
  const row = rows.get(action.actionId);
  if (row) {
    row.update(action);
    decisions.observe(action);
  }
});
const isLive = () => link.phase === 'live';

/** @param {Action} action @param {boolean} fresh came after the page was made */
function take(action, fresh) {
  const row = rows.get(action.actionId);
  if (row) {
    row.update(action);
    decisions.observe(action);
    return;
  }
  const waiting = waitingToShow.get(action.actionId);
  if (action.state !== 'pending') {
    if (waitingToShow.delete(action.actionId)) paintNew();
    return;
  }
  if (tab !== 'waiting' || !fresh || (waiting && waiting.version >= action.version)) return;
  const first = !waiting && waitingToShow.size === 0 && ![...rows.values()].some((one) => one.action.state === 'pending');
  waitingToShow.set(action.actionId, { ...waiting, ...action });
  if (!waiting) notices.someoneWaits(`${visible(action.tool ?? 'An action')} waits for you`);
  if (first) setText(polite, '1 request waits for a decision');
  paintNew();
}

function paintNew() {
  newBar.hidden = waitingToShow.size === 0;
  setText(need('#new-show', HTMLElement), `${waitingToShow.size} new · Show`);
  paintTitle();
}

function showNew() {
  const fresh = [...waitingToShow.values()].sort((a, b) => (a.requestedAt ?? '').localeCompare(b.requestedAt ?? ''));
  waitingToShow.clear();
  for (const action of fresh) {
    const node = /** @type {HTMLElement} */ (/** @type {DocumentFragment} */ (template.content.cloneNode(true)).firstElementChild);
    node.dataset['action'] = action.actionId;
    list.prepend(node);
    const row = new Row(node, action);
    rows.set(action.actionId, row);
    row.paint();
    if (action.argumentsText === undefined || action.tool === undefined) void fetcher.want(action.actionId);
  }
  document.getElementById('empty')?.setAttribute('hidden', '');
  paintNew();
  rows.get(fresh.at(-1)?.actionId ?? '')?.anchor.focus();
}

function paintTitle() {
  const pending = counts['pending'] ?? counts['waiting'] ?? 0;
  document.title = pending > 0 ? `(${pending}) ${plainTitle}` : plainTitle;
  for (const [name, value] of Object.entries(counts)) {
    const cell = document.querySelector(`[data-count="${CSS.escape(name)}"]`);
    if (cell) setText(cell, String(value));
  }
}

/** @param {Row} row */
function select(row) {
  if (selected === row) return;
  selected?.node.classList.remove('selected');
  selected = row;
  row.node.classList.add('selected');
}

/** @param {number} step */
function move(step) {
  const order = [...list.querySelectorAll('.row')].map((node) => rows.get(/** @type {HTMLElement} */ (node).dataset['action'] ?? '')).filter((row) => row !== undefined);
  const at = selected ? order.indexOf(selected) : -1;
  const next = order[Math.min(order.length - 1, Math.max(0, at + step))];
  next?.anchor.focus();
}

function picked() {
  return [...rows.values()].filter((row) => row.pick.checked && row.action.state === 'pending');
}

function paintBatch() {
  const chosen = picked();
  batch.hidden = chosen.length === 0;
  setText(need('#batch-count', HTMLElement), `${chosen.length} selected`);
}

/** @param {'approve' | 'reject'} decision @param {MouseEvent} event */
function decideBatch(decision, event) {
  for (const row of picked()) {
    const { action } = row;
    const why = !isLive() ? 'Not connected: nothing is decided on an old list.'
      : decision === 'approve' && isHigh(action.risk) ? 'High risk is not approved in a batch: open it.'
      : decision === 'approve' && !(row.complete || row.card?.args?.complete()) ? 'Not all of it was shown: open it first.'
      : action.digest === undefined ? 'Still being fetched: try again.'
      : refusal({ shownAt: row.shownAt, risk: action.risk, approving: decision === 'approve', event });
    row.message.dataset['tone'] = 'quiet';
    setText(row.message, why ?? '');
    if (why === null) void decisions.decide(action.actionId, { decision, digest: action.digest ?? '' });
  }
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !keysOn()) return;
  const target = event.target;
  if (target instanceof HTMLElement && (target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement || (target instanceof HTMLInputElement && target.type !== 'checkbox'))) return;
  const row = selected;
  if (event.key === 'j') return move(1);
  if (event.key === 'k') return move(-1);
  if (!row || !['x', 'a', 'r'].includes(event.key) || !mayDecide) return;
  event.preventDefault();
  const why = refusal({ shownAt: row.shownAt, risk: row.action.risk, approving: event.key === 'a', event });
  if (why) return void setText(row.message, why);
  if (event.key === 'x') {
    if (!row.pick.disabled) row.pick.click();
    return;
  }
  if (row.opened.hidden) {
    row.toggle(true);
    setText(row.message, event.key === 'a' ? 'Shown now. Read it, then press a again to approve.' : 'Shown now. Press r again to reject.');
    return;
  }
  if (event.key === 'a') row.card?.press('approve', event);
  else row.card?.askReason(event);
}

const connection = new Connection({
  path: '/ws/inbox/',
  link: () => link,
  dispatch: (event) => {
    if (event.type === 'tick') return paintFreshness();
    if (event.type === 'malformed') return;
    const wasLive = isLive();
    if (event.type === 'message') {
      const { frame } = event;
      link = reduceLink(link, { type: 'frame', at: event.at, serial: event.serial, kind: frame.type, ...(frame.type === 'welcome' ? { heartbeatSeconds: frame.heartbeatSeconds } : {}) });
      if ((frame.type === 'welcome' || frame.type === 'action') && frame.counts) counts = { ...counts, ...frame.counts };
      if (frame.type === 'welcome') {
        link = reduceLink(link, { type: 'frame', at: event.at, serial: event.serial, kind: 'caught_up' });
        const told = new Set(frame.actions.map((action) => action.actionId));
        for (const action of frame.actions) take(action, Date.parse(action.requestedAt ?? '') > renderedAt);
        // What the first page doesn't tell may have changed while nobody listened.
        if (welcomed) for (const row of rows.values()) if (!told.has(row.action.actionId) && ['pending', 'approved', 'executing'].includes(row.action.state)) void fetcher.want(row.action.actionId);
        welcomed = true;
        paintTitle();
      } else if (frame.type === 'action') {
        take(frame.action, true);
        paintTitle();
      }
    } else link = reduceLink(link, event);
    if (wasLive !== isLive()) for (const row of rows.values()) row.card?.update(row.action, isLive());
    paintFreshness();
  },
  hello: () => ({ from: 0 }),
  trouble: () => (silentMs(link, performance.now()) > 2 * link.heartbeatMs + 1000 ? 'the line is frozen' : null),
});

function paintFreshness() {
  const age = Math.round((performance.now() - link.lastFrameAt) / 1000);
  freshness.dataset['phase'] = link.phase;
  setText(freshness, link.phase === 'live' ? (age < 2 ? 'live' : `live, heard ${age} s ago`) : link.phase === 'failed' ? `not connected, this list is ${age} s old` : welcomed ? `reconnecting, this list is ${age} s old` : 'connecting');
  need('#retry', HTMLElement).hidden = link.phase !== 'failed';
}

for (const node of list.querySelectorAll('.row')) {
  if (!(node instanceof HTMLElement)) continue;
  const data = node.dataset;
  /** @type {Action} */
  const action = { actionId: data['action'] ?? '', state: data['state'] ?? '', version: Number(data['version'] ?? 0), risk: data['risk'] ?? '', tool: data['tool'] ?? '', digest: data['digest'] ?? '', ...(data['arguments'] === undefined ? {} : { argumentsText: data['arguments'] }) };
  for (const name of /** @type {const} */ (['requestedAt', 'expiresAt'])) if (data[name]) action[name] = data[name];
  rows.set(action.actionId, new Row(node, action));
}

const notices = wireNotices();
wireHelp();
need('#new-show', HTMLButtonElement).addEventListener('click', showNew);
need('#retry', HTMLButtonElement).addEventListener('click', () => connection.emit({ type: 'continue', at: performance.now() }));
need('#batch-approve', HTMLButtonElement).addEventListener('click', (event) => decideBatch('approve', event));
need('#batch-reject', HTMLButtonElement).addEventListener('click', (event) => decideBatch('reject', event));
need('#batch-clear', HTMLButtonElement).addEventListener('click', () => {
  for (const row of picked()) row.pick.checked = false;
  paintBatch();
});
document.addEventListener('keydown', onKey);
setInterval(() => {
  for (const row of rows.values()) row.tick();
}, 1000);
paintTitle();
decisions.resume();
connection.start();
