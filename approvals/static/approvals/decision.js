// @ts-check
// The click that survives: its key is made once, kept before the first send, and sent until there is a final answer,
// through drops, reloads and a second tab. What each answer means is in verdict.js.

import { bodyOf, follow, judge, newClick, newKey, notRepeated, readClick, retryMs, sending, standsInTheWay, storeKey, unsettled } from './verdict.js';

/** @typedef {import('./verdict.js').Click} Click */
/** @typedef {import('./verdict.js').Outcome} Outcome */
/** @typedef {import('../streams/protocol.js').Action} Action */
/** @typedef {{decision: 'approve' | 'reject', digest: string, reason?: string, argumentsText?: string}} Wish */

const ANSWER_MS = 12000;
const KEPT_DAYS = 30;

/** The current form token: the cookie knows a newer one than the page when someone signed in elsewhere. */
export function csrfToken() {
  const cookie = document.cookie.split('; ').find((pair) => pair.startsWith('csrftoken='));
  return cookie?.slice('csrftoken='.length) || document.querySelector('meta[name="csrf-token"]')?.getAttribute('content') || '';
}

/**
 * POST JSON text, and say what came back, or that nothing did.
 * @param {string} path @param {string} body @returns {Promise<Outcome>}
 */
export async function post(path, body) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), ANSWER_MS);
  try {
    const response = await fetch(path, {
      method: 'POST', body, credentials: 'same-origin', redirect: 'error', cache: 'no-store', signal: abort.signal,
      headers: { 'Content-Type': 'application/json', Accept: 'application/json', 'X-CSRFToken': csrfToken() },
    });
    const text = await response.text();
    let parsed = null;
    try {
      parsed = JSON.parse(text);
    } catch {
      // An answer that is not ours (a proxy's page): judged by its status alone.
    }
    const after = Number(response.headers.get('Retry-After'));
    return { status: response.status, body: parsed, ...(after > 0 && after < 120 ? { retryAfterMs: after * 1000 } : {}) };
  } catch (fault) {
    return { status: 0, why: abort.signal.aborted ? 'no answer in time' : String(fault) };
  } finally {
    clearTimeout(timer);
  }
}

/** Wait, but come back at once when the network does. @param {number} ms @returns {Promise<void>} */
function pause(ms) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      window.removeEventListener('online', done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    window.addEventListener('online', done);
  });
}

/**
 * Hold a name across tabs where the browser can (it can't on plain http: there the kept row and the server's own
 * unique key do it alone).
 * @template T @param {string} name @param {() => Promise<T>} work @returns {Promise<T>}
 */
function held(name, work) {
  return navigator.locks ? navigator.locks.request(name, work) : work();
}

/** The clicks of one person in this browser. */
export class Decisions {
  /** @param {string} user the id of who is signed in @param {(click: Click, action: Action | null) => void} changed */
  constructor(user, changed) {
    this.user = user;
    this.changed = changed;
    /** @type {Set<string>} */
    this.running = new Set();
    window.addEventListener('storage', (event) => {
      const click = event.key?.startsWith(storeKey(this.user, '')) ? readClick(event.newValue) : null;
      if (click && click.user === this.user) this.changed(click, null);
    });
  }

  /** @param {string} actionId @returns {Click | null} */
  kept(actionId) {
    const click = readClick(localStorage.getItem(storeKey(this.user, actionId)));
    return click && click.user === this.user ? click : null;
  }

  /** @param {Click} click @param {Action | null} [action] */
  keep(click, action = null) {
    localStorage.setItem(storeKey(click.user, click.actionId), JSON.stringify(click));
    this.changed(click, action);
  }

  /**
   * Take a click. When one is kept for this action already (an earlier one, another tab's), that one stands and no
   * second key is made: the answer is its story.
   * @param {string} actionId @param {Wish} wish
   */
  async decide(actionId, wish) {
    if (this.running.has(actionId)) return;
    this.running.add(actionId);
    try {
      const stands = await held(`${storeKey(this.user, actionId)}.make`, async () => {
        const before = this.kept(actionId);
        if (before && standsInTheWay(before)) return before;
        const key = newKey((bytes) => crypto.getRandomValues(bytes));
        const click = newClick({ user: this.user, actionId, key, at: Date.now(), ...wish });
        this.keep(click); // before the first send: from here on a crash of anything only delays it
        return null;
      });
      if (!stands || unsettled(stands)) await this.send(actionId);
      const settled = stands ? this.kept(actionId) : null;
      if (settled && !unsettled(settled) && settled.step !== 'refused') this.keep(notRepeated(settled, wish.decision));
    } finally {
      this.running.delete(actionId);
    }
  }

  /** Send the kept click until there is a final answer. One tab at a time; the others find it settled. @param {string} actionId */
  async send(actionId) {
    await held(`${storeKey(this.user, actionId)}.send`, async () => {
      for (;;) {
        const click = this.kept(actionId);
        if (!click || !unsettled(click)) {
          if (click) this.changed(click, null);
          return;
        }
        const sent = sending(click);
        this.keep(sent);
        const outcome = await post(`/api/v1/approvals/${encodeURIComponent(actionId)}/decision`, bodyOf(sent));
        const verdict = judge(sent, outcome, Date.now());
        const action = outcome.status !== 0 && 'body' in outcome ? outcome.body?.action ?? null : null;
        this.keep(verdict.click, action);
        if (!verdict.again) return;
        await pause(verdict.waitMs ?? retryMs(sent.tries, Math.random()));
      }
    });
  }

  /** Go on with what an earlier page left unsent, and forget what is long over. */
  resume() {
    const prefix = storeKey(this.user, '');
    const names = Array.from({ length: localStorage.length }, (_, index) => localStorage.key(index) ?? '').filter((name) => name.startsWith(prefix));
    for (const name of names) {
      const click = readClick(localStorage.getItem(name));
      if (!click) continue;
      if (unsettled(click)) {
        if (this.running.has(click.actionId)) continue;
        this.running.add(click.actionId);
        void this.send(click.actionId).finally(() => this.running.delete(click.actionId));
      } else if (Date.now() - click.at > KEPT_DAYS * 86400000) localStorage.removeItem(name);
      else this.changed(click, null);
    }
  }

  /** Tell a kept click what became of its action. @param {Action} action */
  observe(action) {
    const click = this.kept(action.actionId);
    if (!click) return;
    const next = follow(click, action);
    if (next !== click) this.keep(next, action);
  }
}
