// @ts-check
// One request on its own page: the same card, with edits, and the form for what nobody knows the end of.

import { Connection } from '../streams/connection.js';
import { need, serverNow, setText } from '../streams/dom.js';
import { mergeAction } from '../streams/fold.js';
import { linkOff, reduceLink, silentMs } from '../streams/link.js';
import { Card } from './card.js';
import { Decisions, post } from './decision.js';
import { Fetcher } from './fetching.js';
import { ago, newKey } from './verdict.js';

/** @typedef {import('../streams/protocol.js').Action} Action */

const page = need('#request', HTMLElement);
const actionId = page.dataset['action'] ?? '';
const user = page.dataset['user'] ?? '';
const fresh = need('#freshness', HTMLElement);
const polite = need('#polite', HTMLElement);

let link = linkOff();
/** @type {Action | null} */
let action = null;
/** The socket's serial when the shown action was last read: older than the socket, it may be stale. */
let readIn = -1;
let asking = -1;
let again = false;

const card = new Card(actionId, { decide: (id, wish) => void decisions.decide(id, wish), mayDecide: page.dataset['mayDecide'] === 'true', user, editable: true });
const decisions = new Decisions(user, (click, told) => {
  if (click.actionId !== actionId) return;
  card.follow(click);
  if (told) got(told);
});
const fetcher = new Fetcher((found) => {
  readIn = asking;
  got(found);
  if (again) read();
});

function read() {
  if (fetcher.under.has(actionId)) {
    again = true;
    return;
  }
  again = false;
  asking = link.serial;
  void fetcher.want(actionId);
}

const isLive = () => link.phase === 'live' && readIn === link.serial;

/** @param {Action} found */
function got(found) {
  if (action !== null && found.version < action.version) return;
  if (action !== null && action.state !== found.state) setText(polite, `Now: ${found.state}`);
  const whole = mergeAction(action === null ? {} : { [actionId]: action }, found, true)[actionId] ?? found;
  action = whole;
  card.update(whole, isLive());
  decisions.observe(whole);
  const form = document.getElementById('reconcile');
  if (form) form.hidden = whole.state !== 'unknown';
  document.body.dataset['action'] = whole.state;
}

const connection = new Connection({
  path: '/ws/inbox/',
  link: () => link,
  dispatch: (event) => {
    if (event.type === 'tick' || event.type === 'malformed') {
      if (event.type === 'tick') paintFreshness();
      if (link.phase === 'live' && (readIn !== link.serial || again)) read();
      return;
    }
    const before = link;
    if (event.type === 'message') {
      const { frame } = event;
      link = reduceLink(link, { type: 'frame', at: event.at, serial: event.serial, kind: frame.type, ...(frame.type === 'welcome' ? { heartbeatSeconds: frame.heartbeatSeconds } : {}) });
      if (frame.type === 'welcome') link = reduceLink(link, { type: 'frame', at: event.at, serial: event.serial, kind: 'caught_up' });
      // A frame of the list only says that something changed: what is shown here is read whole.
      if (frame.type === 'welcome' || (frame.type === 'action' && frame.action.actionId === actionId && frame.action.version > (action?.version ?? 0))) read();
    } else link = reduceLink(link, event);
    if (link.phase !== before.phase && action) card.update(action, isLive());
    paintFreshness();
  },
  hello: () => ({ from: 0 }),
  trouble: () => (silentMs(link, performance.now()) > 2 * link.heartbeatMs + 1000 ? 'the line is frozen' : null),
});

function paintFreshness() {
  setText(fresh, link.phase === 'live' ? 'live' : link.phase === 'failed' ? 'not connected; what you see may be old' : 'reconnecting; what you see may be old');
  fresh.dataset['phase'] = link.phase;
}

const reconcile = document.getElementById('reconcile');
if (reconcile instanceof HTMLFormElement) {
  const said = need('#reconcile-said', HTMLElement);
  // One key for this form's one intent; changing what is said makes it another.
  let key = newKey((bytes) => crypto.getRandomValues(bytes));
  reconcile.addEventListener('input', () => {
    key = newKey((bytes) => crypto.getRandomValues(bytes));
  });
  reconcile.addEventListener('submit', (event) => {
    event.preventDefault();
    const form = new FormData(reconcile);
    const outcome = form.get('outcome');
    const note = String(form.get('note') ?? '').trim();
    if (!outcome || note === '') {
      setText(said, 'Say what happened, and how you know.');
      return;
    }
    setText(said, 'Sent, waiting for the answer');
    void post(`/api/v1/approvals/${encodeURIComponent(actionId)}/reconcile`, JSON.stringify({ idempotencyKey: key, outcome, note })).then((answer) => {
      if (answer.status === 200) {
        setText(said, 'Recorded');
        read();
      } else if (answer.status === 0 || answer.status >= 500) setText(said, 'No answer yet. Send it again: it counts once.');
      else setText(said, `Not recorded: ${'body' in answer ? answer.body?.detail ?? answer.status : answer.status}`);
    });
  });
}

need('#card', HTMLElement).replaceChildren(card.node);
document.getElementById('plain')?.remove();
card.follow(decisions.kept(actionId));
setInterval(() => {
  card.tick();
  for (const time of document.querySelectorAll('time.age')) if (time instanceof HTMLTimeElement) setText(time, ago(time.dateTime, serverNow()));
}, 1000);
decisions.resume();
connection.start();
