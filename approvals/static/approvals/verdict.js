// @ts-check
// The pure half of a click: what is kept of it, what is sent, and what each answer means. No DOM, no network, no clock.

/** @typedef {import('../streams/protocol.js').Action} Action */
/** @typedef {import('../streams/protocol.js').Decision} Decision */
/**
 * One click as it is kept in the browser. `argumentsText` stays text: a browser's numbers would change it.
 * @typedef {{
 *   v: 1, user: string, actionId: string, key: string, decision: 'approve' | 'reject',
 *   reason?: string, argumentsText?: string, digest: string, at: number,
 *   step: Step, tries: number, message: string, tone: 'quiet' | 'good' | 'bad', settledAt?: number, trouble?: string
 * }} Click
 */
/** @typedef {'kept' | 'sent' | 'recorded' | 'executing' | 'done' | 'refused' | 'signed_out'} Step */
/**
 * What came of one sending: an HTTP answer (body parsed, or null when it was no JSON), or no answer at all.
 * @typedef {{status: number, body: any, retryAfterMs?: number} | {status: 0, why: string}} Outcome
 */

export const LADDER = /** @type {const} */ (['kept', 'sent', 'recorded', 'executing', 'done']);

/** @param {(bytes: Uint8Array<ArrayBuffer>) => Uint8Array} fill `crypto.getRandomValues`: `randomUUID` is missing on plain http */
export function newKey(fill) {
  const bytes = fill(new Uint8Array(20));
  return `click-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')}`;
}

/** Where a click is kept: by person first, so that no one sends another's. @param {string} user @param {string} actionId */
export function storeKey(user, actionId) {
  return `agentsite.click.${user}.${actionId}`;
}

/**
 * @param {{user: string, actionId: string, key: string, decision: 'approve' | 'reject', digest: string, reason?: string, argumentsText?: string, at: number}} made
 * @returns {Click}
 */
export function newClick(made) {
  return { v: 1, ...made, step: 'kept', tries: 0, message: 'Kept in this browser', tone: 'quiet' };
}

/** @param {string | null} text @returns {Click | null} */
export function readClick(text) {
  if (text === null) return null;
  try {
    const raw = JSON.parse(text);
    const whole = raw?.v === 1 && ['user', 'actionId', 'key', 'digest', 'step'].every((name) => typeof raw[name] === 'string')
      && (raw.decision === 'approve' || raw.decision === 'reject') && typeof raw.tries === 'number';
    return whole ? raw : null;
  } catch {
    return null;
  }
}

/** The body to send; the edit goes as its own text. @param {Click} click */
export function bodyOf(click) {
  const head = { idempotencyKey: click.key, decision: click.decision, digest: click.digest, ...(click.reason === undefined ? {} : { reason: click.reason }) };
  const text = JSON.stringify(head);
  return click.argumentsText === undefined ? text : `${text.slice(0, -1)},"arguments":${click.argumentsText}}`;
}

/** What a second click on the same action is told, in this tab or another. @param {Click} click @param {'approve' | 'reject'} wished @returns {Click} */
export function notRepeated(click, wished) {
  const did = click.decision === 'approve' ? 'approved' : 'rejected';
  return { ...click, message: click.decision === wished ? 'Already recorded, not repeated' : `Already recorded: you ${did} it`, tone: 'good' };
}

/** A click that still wants an answer. @param {Click} click */
export function unsettled(click) {
  return click.step === 'kept' || click.step === 'sent' || click.step === 'signed_out';
}

/** Does a new click for this action have to wait for, or give way to, the kept one? @param {Click | null} kept */
export function standsInTheWay(kept) {
  return kept !== null && kept.step !== 'refused';
}

/** @param {Click} click @returns {Click} */
export function sending(click) {
  const tries = click.tries + 1;
  return { ...click, step: 'sent', tries, message: tries === 1 ? 'Sent, waiting for the answer' : `Sent, try ${tries}`, tone: 'quiet' };
}

/** How long to wait before the next try. @param {number} tries @param {number} random 0 … 1 */
export function retryMs(tries, random) {
  const most = Math.min(10000, 250 * 2 ** Math.min(tries - 1, 8));
  return Math.round(most / 2 + (most / 2) * random);
}

/** @param {string} iso @param {number} now milliseconds since 1970 */
export function ago(iso, now) {
  const seconds = Math.max(0, Math.round((now - Date.parse(iso)) / 1000));
  if (Number.isNaN(seconds)) return '';
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
}

/** @param {string} decision */
function past(decision) {
  return decision === 'approve' || decision === 'approved' ? 'approved' : 'rejected';
}

/** Who decided it, as far as the action says. @param {Action | undefined} action @returns {Decision | null} */
export function lastDecision(action) {
  return action?.decisions?.at(-1) ?? action?.decision ?? null;
}

/** @param {Click} click @param {string} message @returns {Click} */
function refused(click, message) {
  return { ...click, step: 'refused', message, tone: 'bad' };
}

/**
 * The step an action's own state puts a recorded click on.
 * @param {Click} click @param {Action} action @returns {Click}
 */
export function follow(click, action) {
  if (unsettled(click) || click.step === 'refused' || action.actionId !== click.actionId) return click;
  switch (action.state) {
    case 'executing':
      return click.step === 'executing' ? click : { ...click, step: 'executing' };
    case 'done':
      return click.step === 'done' ? click : { ...click, step: 'done' };
    case 'failed':
      return click.step === 'done' ? click : { ...click, step: 'done', message: 'It ran and failed', tone: 'bad' };
    case 'unknown':
      return { ...click, message: 'Nobody knows whether it ran: a person must look', tone: 'bad' };
    default:
      return click;
  }
}

const FINAL_403 = new Set(['not_allowed', 'self_approval', 'people_only', 'origin_refused']);
/** @type {Record<string, string>} */
const REFUSED = {
  self_approval: 'Not applied: this is your own request, someone else must decide',
  people_only: 'Not applied: only people decide',
  not_allowed: 'Not applied: you may not decide this',
  expired: 'Not applied: the time ran out before',
  cancelled: 'Not applied: it was cancelled before',
  digest_mismatch: 'Not applied: the arguments changed since you looked',
  idempotency_key_reused: 'Not applied: this click’s key was used for something else',
  needs_more_approvals: 'Not applied: with these arguments it needs more approvals',
  digest_required: 'Not applied: the page did not say what it showed',
};

/**
 * What an answer makes of a click. `again` says whether the same key must be sent once more.
 * @param {Click} click @param {Outcome} outcome @param {number} now milliseconds since 1970
 * @returns {{click: Click, again: boolean, waitMs?: number}}
 */
export function judge(click, outcome, now) {
  if (outcome.status === 0) {
    return { click: { ...click, step: 'sent', trouble: 'why' in outcome ? outcome.why : '', message: `No answer yet (try ${click.tries}); the same click is sent again` }, again: true };
  }
  const { status, body } = /** @type {{status: number, body: any, retryAfterMs?: number}} */ (outcome);
  const wait = 'retryAfterMs' in outcome && outcome.retryAfterMs !== undefined ? { waitMs: outcome.retryAfterMs } : {};
  const code = typeof body?.code === 'string' ? body.code : '';
  /** @type {Action | undefined} */
  const action = typeof body?.action === 'object' && body.action !== null ? body.action : undefined;
  const settled = { ...click, settledAt: now };

  if (status >= 200 && status < 300 && body?.decision) {
    const before = body.replayed === true || body.alreadyDecided === true;
    const message = before ? 'Already recorded, not repeated' : click.decision === 'approve' ? 'Approval recorded' : 'Rejection recorded';
    const recorded = /** @type {Click} */ ({ ...settled, step: 'recorded', message, tone: 'good' });
    return { click: action ? follow(recorded, action) : recorded, again: false };
  }
  if (status === 401) {
    return { click: { ...click, step: 'signed_out', message: 'Your session ended. The click is kept; sign in again and it is sent', tone: 'bad' }, again: false };
  }
  if (status === 403 && !FINAL_403.has(code)) {
    // Not the decision's answer but the door's (a stale form token, a proxy): the click may still count.
    return { click: { ...click, step: 'sent', message: `The server asked for a fresh page (try ${click.tries})`, trouble: 'csrf' }, again: true };
  }
  if (status === 409 && code === 'in_flight') return { click: { ...click, step: 'sent', message: `Being recorded (try ${click.tries})` }, again: true, ...wait };
  if (status === 408 || status === 425 || status === 429 || status >= 500) {
    return { click: { ...click, step: 'sent', message: `The server could not answer (${status}, try ${click.tries}); the same click is sent again` }, again: true, ...wait };
  }
  const mine = click.decision === 'approve' ? 'approval' : 'rejection';
  if (code === 'already_decided') {
    const other = lastDecision(action);
    const words = other ? `Already ${past(other.decision)} by ${other.actor.name} ${ago(other.at, now)}: your ${mine} was not applied` : `Already decided: your ${mine} was not applied`;
    return { click: refused(settled, words), again: false };
  }
  if (status === 404) return { click: refused(settled, 'Not applied: there is no such request, or you may not see it'), again: false };
  const detail = typeof body?.detail === 'string' ? body.detail : '';
  const field = typeof body?.field === 'string' ? ` (${body.field})` : '';
  return { click: refused(settled, REFUSED[code] ?? `Not applied: ${detail || code || `the server said ${status}`}${field}`), again: false };
}
