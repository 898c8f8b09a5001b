// @ts-check
// The run page: one log, its state in a sentence, its cards.

import { Connection } from '../streams/connection.js';
import { el, need, setText } from '../streams/dom.js';
import { Painter } from '../streams/paint.js';
import { visible } from '../streams/safetext.js';
import { buttonsLive, describe, frozen, newSession, reduce } from '../streams/session.js';
import { Card } from './card.js';
import { Decisions, post } from './decision.js';
import { Fetcher } from './fetching.js';

/** @typedef {import('../streams/session.js').SessionEvent} SessionEvent */
/** @typedef {import('../streams/session.js').Verb} Verb */

const page = need('#run', HTMLElement);
const generation = page.dataset['generation'] ?? '';
const user = page.dataset['user'] ?? '';
const stateBadge = need('#state-name', HTMLElement);
const sentence = need('#state-sentence', HTMLElement);
const choices = need('#choices', HTMLElement);
const log = need('#log', HTMLElement);
const details = need('#details', HTMLElement);
const alerts = need('#alert', HTMLElement);
const polite = need('#polite', HTMLElement);

let state = newSession(user);
/** @type {Map<string, Card>} */
const cards = new Map();

const decisions = new Decisions(user, (click, action) => {
  cards.get(click.actionId)?.follow(click);
  if (action) dispatch({ type: 'action', at: performance.now(), action });
});
const fetcher = new Fetcher((action) => dispatch({ type: 'action', at: performance.now(), action }));

/** @param {string} actionId */
function cardFor(actionId) {
  let card = cards.get(actionId);
  if (!card) {
    card = new Card(actionId, { decide: (id, wish) => void decisions.decide(id, wish), mayDecide: page.dataset['mayDecide'] === 'true', user, link: true });
    cards.set(actionId, card);
    card.follow(decisions.kept(actionId));
  }
  return card;
}

const painter = new Painter(log, (actionId) => cardFor(actionId).node);

const connection = new Connection({
  path: `/ws/generations/${encodeURIComponent(generation)}/`,
  link: () => state.link,
  dispatch,
  hello: () => ({ from: state.fold.next, ...(state.epoch === null ? {} : { epoch: state.epoch }) }),
  acked: () => state.fold.next - 1,
  trouble: () => (state.gap !== null ? `entry ${state.gap} missing` : frozen(state) ? 'the line is frozen' : null),
});

/** @param {SessionEvent} event */
function dispatch(event) {
  const before = state;
  state = reduce(state, event);
  if (state === before) return;
  painter.paint(state.fold);
  paintCards(before);
  paintState();
  if (state.stop === 'wanted' && before.stop !== 'wanted') void askStop();
  else if (state.stop === 'wanted' && state.caughtUp && !before.caughtUp) void askStop();
  if (state.caughtUp && !before.caughtUp) {
    painter.flush();
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  }
}

/** @param {import('../streams/session.js').Session} before */
function paintCards(before) {
  const live = buttonsLive(state);
  const liveChanged = live !== buttonsLive(before);
  if (state.fold.actions === before.fold.actions && !liveChanged && state.fold.items === before.fold.items) return;
  for (const action of Object.values(state.fold.actions)) {
    if (action !== before.fold.actions[action.actionId] || liveChanged || !cards.has(action.actionId)) {
      cardFor(action.actionId).update(action, live);
      decisions.observe(action);
      const known = before.fold.actions[action.actionId];
      if (state.caughtUp && before.caughtUp && known?.state !== action.state) {
        setText(polite, `${visible(action.tool ?? 'An action')}: ${action.state === 'pending' ? 'waits for your decision' : action.state}`);
      }
    }
    // Notices tell arguments by digest; the page shows the text, so it is fetched whenever it is not the one it has.
    if (action.argumentsText === undefined || action.tool === undefined) void fetcher.want(action.actionId);
  }
}

let lastName = '';
let lastChoices = '';
function paintState() {
  const said = describe(state);
  if (setText(stateBadge, said.name)) stateBadge.dataset['name'] = said.name;
  setText(sentence, visible(said.sentence));
  if (log.getAttribute('aria-busy') !== String(said.busy)) log.setAttribute('aria-busy', String(said.busy));
  const key = JSON.stringify(said.choices);
  if (key !== lastChoices) {
    lastChoices = key;
    paintChoices(said.choices);
  }
  if (said.name !== lastName) {
    document.body.dataset['run'] = said.name;
    if (said.name === 'error') setText(alerts, said.sentence);
    else if (alerts.textContent !== '') alerts.textContent = '';
    if (['done', 'cancelled', 'stalled', 'retrying'].includes(said.name) || lastName === 'retrying') setText(polite, `${said.name}: ${said.sentence}`);
    lastName = said.name;
  }
  /** @type {Array<[string, string]>} */
  const counters = [
    ['tokens', String(state.fold.received)], ['writes', String(painter.writes)], ['attempt', String(state.fold.attempt)],
    ['reconnects', String(state.link.reconnects)], ['ttfb', state.ttfbMs === null ? '–' : `${Math.round(state.ttfbMs)} ms`],
  ];
  for (const [name, value] of counters) {
    const cell = document.getElementById(`count-${name}`);
    if (cell) setText(cell, value);
  }
}

/** Buttons keep their place and their focus when only their words change. @param {import('../streams/session.js').Choice[]} wanted */
function paintChoices(wanted) {
  const old = new Map([...choices.querySelectorAll('button')].map((button) => [button.dataset['verb'], button]));
  const buttons = wanted.map(({ verb, label }) => {
    const button = old.get(verb) ?? el('button', { type: 'button', 'data-verb': verb, class: verb === 'stop' ? 'danger' : '' });
    old.delete(verb);
    if (!button.dataset['wired']) {
      button.dataset['wired'] = 'yes';
      button.addEventListener('click', () => act(verb));
    }
    setText(button, label);
    return button;
  });
  buttons.forEach((button, index) => {
    if (choices.children[index] !== button) choices.insertBefore(button, choices.children[index] ?? null);
  });
  for (const button of old.values()) button.remove();
}

/** @param {Verb} verb */
function act(verb) {
  const at = performance.now();
  switch (verb) {
    case 'start':
      return connection.start();
    case 'stop':
      return dispatch({ type: 'stop', at });
    case 'reconnect':
      return connection.emit({ type: 'reopen', at });
    case 'retry_now':
      return connection.emit({ type: 'retry_now', at });
    case 'continue':
      return connection.emit({ type: 'continue', at });
    case 'start_again':
      dispatch({ type: 'start_again', at });
      return connection.reconcile();
    case 'permalink':
      location.hash = `e${Math.max(0, state.fold.next - 1)}`;
      return;
    case 'sign_in':
      location.assign(`/accounts/login/?next=${encodeURIComponent(location.pathname)}`);
      return;
    case 'details':
      details.hidden = !details.hidden;
      details.replaceChildren(el('h2', {}, 'What went wrong'), el('ol', {}, ...state.problems.map((words) => el('li', {}, visible(words)))));
  }
}

/** Ask for the stop: on the socket when it is live, else over HTTP; asking twice is the same as once. */
async function askStop() {
  if (buttonsLive(state) && connection.send({ type: 'cancel' })) {
    dispatch({ type: 'stop_sent', at: performance.now() });
    return;
  }
  const outcome = await post(`/api/v1/generations/${encodeURIComponent(generation)}/cancel`, '{}');
  if (outcome.status === 200 || outcome.status === 202) dispatch({ type: 'stop_accepted', at: performance.now() });
}

setInterval(() => {
  for (const card of cards.values()) card.tick();
}, 1000);
decisions.resume();
connection.start();
