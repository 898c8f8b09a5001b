// @ts-check
// One socket's life as a pure machine: attempts, backoff, heartbeats, and which closes are final.
// It knows nothing of logs; the run page and the inbox share it.

/**
 * `serial` names one attempt: whatever a socket of an older serial says is not listened to.
 * @typedef {{
 *   phase: 'off' | 'opening' | 'replaying' | 'live' | 'waiting' | 'failed',
 *   serial: number, attempt: number, reconnects: number, retryAt: number, delayMs: number,
 *   liveSince: number | null, lastFrameAt: number, heartbeatMs: number,
 *   closeCode: number | null, closeReason: string, final: boolean
 * }} Link
 */
/**
 * @typedef {{type: 'start', at: number}
 *   | {type: 'frame', at: number, serial: number, kind: string, heartbeatSeconds?: number}
 *   | {type: 'closed', at: number, serial: number, code: number, reason: string, random: number}
 *   | {type: 'due', at: number} | {type: 'retry_now', at: number} | {type: 'continue', at: number}
 *   | {type: 'wake', at: number} | {type: 'reopen', at: number} | {type: 'off', at: number}} LinkEvent
 */

export const ATTEMPTS = 4;
/** A connection that lasted this long was well: the next trouble is a new one. */
export const HEALTHY_MS = 5000;
/** Closes after which asking again would say the same. */
const FINAL_CODES = new Set([4400, 4401, 4403, 4404]);

/** @returns {Link} */
export function linkOff() {
  return {
    phase: 'off', serial: 0, attempt: 0, reconnects: 0, retryAt: 0, delayMs: 0, liveSince: null, lastFrameAt: 0,
    heartbeatMs: 15000, closeCode: null, closeReason: '', final: false,
  };
}

/**
 * How long to wait after attempt `n` failed: anything up to min(2000, 250·2^(n−1)) ms, so that many readers
 * of one server that came back don't come at once.
 * @param {number} n @param {number} random 0 … 1
 */
export function backoffMs(n, random) {
  return Math.max(1, Math.round(Math.min(2000, 250 * 2 ** (n - 1)) * random));
}

/** @param {Link} link @param {number} attempt @param {number} at @returns {Link} */
function opening(link, attempt, at) {
  return {
    ...link, phase: 'opening', serial: link.serial + 1, attempt, liveSince: null, lastFrameAt: at, final: false,
    reconnects: link.serial === 0 ? 0 : link.reconnects + 1,
  };
}

/** @param {Link} link @param {LinkEvent} event @returns {Link} */
export function reduceLink(link, event) {
  switch (event.type) {
    case 'start':
      return link.phase === 'off' || link.phase === 'failed' ? opening(link, 1, event.at) : link;
    case 'frame': {
      if (event.serial !== link.serial || (link.phase !== 'opening' && link.phase !== 'replaying' && link.phase !== 'live')) return link;
      const heard = { ...link, lastFrameAt: event.at };
      if (event.kind === 'welcome') return { ...heard, phase: 'replaying', heartbeatMs: (event.heartbeatSeconds ?? 15) * 1000 };
      if (event.kind === 'caught_up' && link.phase === 'replaying') return { ...heard, phase: 'live', liveSince: event.at };
      return heard;
    }
    case 'closed': {
      if (event.serial !== link.serial || link.phase === 'off' || link.phase === 'waiting' || link.phase === 'failed') return link;
      const healthy = event.code === 4408 || (link.liveSince !== null && event.at - link.liveSince >= HEALTHY_MS);
      const attempt = healthy ? 1 : link.attempt;
      const closed = { ...link, attempt, liveSince: null, closeCode: event.code, closeReason: event.reason };
      if (FINAL_CODES.has(event.code)) return { ...closed, phase: 'failed', final: true };
      if (attempt >= ATTEMPTS) return { ...closed, phase: 'failed', final: false };
      const delayMs = backoffMs(attempt, event.random);
      return { ...closed, phase: 'waiting', attempt: attempt + 1, delayMs, retryAt: event.at + delayMs };
    }
    case 'due':
      return link.phase === 'waiting' && event.at >= link.retryAt ? opening(link, link.attempt, event.at) : link;
    case 'retry_now':
      return link.phase === 'waiting' ? opening(link, link.attempt, event.at) : link;
    case 'continue':
      return link.phase === 'failed' || link.phase === 'waiting' ? opening(link, 1, event.at) : link;
    case 'wake':
      // The network or the person came back: what we concluded while they were away says nothing now.
      if (link.phase === 'waiting' || (link.phase === 'failed' && !link.final)) return opening(link, 1, event.at);
      return isOpen(link) && event.at - link.lastFrameAt > link.heartbeatMs * 1.5 ? opening(link, 1, event.at) : link;
    case 'reopen':
      return isOpen(link) ? opening(link, link.attempt, event.at) : link;
    case 'off':
      return { ...link, phase: 'off', liveSince: null };
  }
}

/** A socket is wanted and may be there. @param {Link} link */
export function isOpen(link) {
  return link.phase === 'opening' || link.phase === 'replaying' || link.phase === 'live';
}

/** How long nothing at all was heard on an open socket. @param {Link} link @param {number} now */
export function silentMs(link, now) {
  return isOpen(link) ? Math.max(0, now - link.lastFrameAt) : 0;
}

/** Words for why a socket closed. @param {number | null} code @param {string} reason */
export function closeWords(code, reason) {
  /** @type {Record<number, string>} */
  const known = {
    4400: 'the server did not understand this page; reload it', 4401: 'please sign in again', 4403: 'you may not see this',
    4404: 'there is no such run', 4408: 'this reader fell behind', 4429: 'too many connections',
  };
  return (code !== null && known[code]) || reason || 'refused';
}
