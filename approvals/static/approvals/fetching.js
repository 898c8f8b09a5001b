// @ts-check
// Reading approval requests over HTTP, with every number's digits kept.

import { checkAction, parseJsonExactly } from '../streams/protocol.js';

/** @typedef {import('../streams/protocol.js').Action} Action */

/** @param {string} actionId @returns {Promise<Action>} the action as it is now; throws when there is no answer */
export async function fetchAction(actionId) {
  const response = await fetch(`/api/v1/approvals/${encodeURIComponent(actionId)}`, {
    credentials: 'same-origin', cache: 'no-store', headers: { Accept: 'application/json' }, signal: AbortSignal.timeout(12000),
  });
  if (!response.ok) throw new Error(`the server said ${response.status}`);
  return checkAction(parseJsonExactly(await response.text()));
}

/** Fetches each wanted action once at a time, and again later when it failed. */
export class Fetcher {
  /** @param {(action: Action) => void} got */
  constructor(got) {
    this.got = got;
    /** @type {Set<string>} */
    this.under = new Set();
    /** @type {Map<string, number>} */
    this.notBefore = new Map();
  }

  /** @param {string} actionId */
  async want(actionId) {
    if (this.under.has(actionId) || performance.now() < (this.notBefore.get(actionId) ?? 0)) return;
    this.under.add(actionId);
    try {
      this.got(await fetchAction(actionId));
      this.notBefore.delete(actionId);
    } catch {
      this.notBefore.set(actionId, performance.now() + 1000 + Math.random() * 1000);
    } finally {
      this.under.delete(actionId);
    }
  }
}
