// @ts-check
// What the server may say over a socket: types, and the one place that checks them.
// Nothing behind this file looks at a field that was not checked here.

/** @typedef {{kind: string, id: string, name: string}} Actor */
/** @typedef {{promptTokens: number, completionTokens: number, totalTokens: number}} Usage */
/** @typedef {{type: 'text', content: string}} TextChunk */
/** @typedef {{type: 'tool_call', id: string, name: string, arguments: string, index: number}} CallChunk */
/** @typedef {{type: 'tool_result', id: string, toolCallId: string, result: unknown, isError: boolean}} ResultChunk */
/** @typedef {{type: 'error', error: {code: string, message: string}, recoverable: boolean, retryAfter?: number}} ErrorChunk */
/** @typedef {{type: 'done', reason: string, usage?: Usage}} DoneChunk */
/** @typedef {{type: 'unknown', raw: string}} UnknownChunk what a newer server may send: shown, never dropped */
/** @typedef {TextChunk | CallChunk | ResultChunk | ErrorChunk | DoneChunk | UnknownChunk} Chunk */

/** @typedef {{fence?: number, executor?: unknown, startedAt?: string, leaseExpiresAt?: string, finishedAt?: string}} Execution */
/** @typedef {{id?: string, decision: string, reason?: string, actor: Actor, at: string, digest?: string}} Decision */
/**
 * An approval request as far as this client has been told of it. Only the first three are sure to be there.
 * @typedef {{
 *   actionId: string, state: string, version: number, generationId?: string, toolCallId?: string, conversation?: string,
 *   tool?: string, argumentsText?: string, digest?: string, risk?: string, effects?: string, executor?: string, gated?: boolean,
 *   requestedBy?: Actor, requestedAt?: string, expiresAt?: string, approvedUntil?: string,
 *   policy?: {name: string, version: number, rule: string}, approvalsRequired?: number, decisions?: Decision[],
 *   edited?: boolean, originalArgumentsText?: string, originalDigest?: string, cancelRequested?: boolean,
 *   execution?: Execution, summary?: string, context?: unknown, result?: unknown, isError?: boolean,
 *   previousActionId?: string, actor?: Actor, decision?: Decision
 * }} Action
 */
/** @typedef {{type: 'action'} & Action} ActionNotice */
/** @typedef {{type: 'restart', attempt: number, supersededFrom: number}} RestartNotice */
/** @typedef {{type: 'cancel_requested', actor?: Actor}} CancelNotice */
/** @typedef {{type: 'unknown', raw: string}} UnknownNotice */
/** @typedef {ActionNotice | RestartNotice | CancelNotice | UnknownNotice} Notice */
/** @typedef {{offset: number, attempt: number, at: string} & ({chunk: Chunk, notice?: never} | {notice: Notice, chunk?: never})} Entry */
/** @typedef {{id?: string, state?: string, openActions?: number, finishReason?: string, title?: string}} Generation */

/** @typedef {{type: 'welcome', epoch: string | null, generation: Generation, actions: Action[], firstOffset: number, nextOffset: number, heartbeatSeconds: number, asOf?: string, counts?: Record<string, number>}} WelcomeFrame */
/** @typedef {{type: 'reset', reason: string, epoch: string | null, firstOffset: number}} ResetFrame */
/** @typedef {{type: 'entries', entries: Entry[]}} EntriesFrame */
/** @typedef {{type: 'caught_up', nextOffset: number}} CaughtUpFrame */
/** @typedef {{type: 'heartbeat', nextOffset: number | null}} HeartbeatFrame */
/** @typedef {{type: 'decided', requestId: string, replayed: boolean, alreadyDecided: boolean, decision: Decision, action: Action}} DecidedFrame */
/** @typedef {{type: 'cancel_accepted'}} CancelAcceptedFrame */
/** @typedef {{type: 'error', requestId?: string, code: string, detail: string, action?: Action}} ErrorFrame */
/** @typedef {{type: 'action', action: Action, counts?: Record<string, number>}} ActionFrame the inbox socket's */
/** @typedef {WelcomeFrame | ResetFrame | EntriesFrame | CaughtUpFrame | HeartbeatFrame | DecidedFrame | CancelAcceptedFrame | ErrorFrame | ActionFrame} Frame */

/** A number as the server wrote it, where a browser's own number would say something else. */
export class ExactNumber {
  /** @param {string} source */
  constructor(source) {
    this.source = source;
  }
  toString() {
    return this.source;
  }
}

class Malformed extends Error {}

/** @typedef {Record<string, unknown>} Raw */

/** @param {unknown} value @param {string} where @returns {Raw} */
function record(value, where) {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new Malformed(`${where} is not an object`);
  return /** @type {Raw} */ (value);
}

/** @param {Raw} raw @param {string} key @returns {string} */
function text(raw, key) {
  const value = raw[key];
  if (typeof value !== 'string') throw new Malformed(`${key} is not a string`);
  return value;
}

/** @param {Raw} raw @param {string} key @returns {number} */
function count(raw, key) {
  const value = raw[key];
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 0) throw new Malformed(`${key} is not a count`);
  return value;
}

/** @param {Raw} raw @param {string} key @param {number} otherwise @returns {number} */
function countOr(raw, key, otherwise) {
  return raw[key] === undefined || raw[key] === null ? otherwise : count(raw, key);
}

/** @param {Raw} raw @param {string} key @returns {string | null} */
function textOrNull(raw, key) {
  return raw[key] === undefined || raw[key] === null ? null : text(raw, key);
}

/** @param {unknown} value @returns {Chunk} */
function chunk(value) {
  const raw = record(value, 'chunk');
  switch (raw['type']) {
    case 'text':
      return { type: 'text', content: text(raw, 'content') };
    case 'tool_call':
      return { type: 'tool_call', id: text(raw, 'id'), name: text(raw, 'name'), arguments: text(raw, 'arguments'), index: countOr(raw, 'index', 0) };
    case 'tool_result':
      return { type: 'tool_result', id: text(raw, 'id'), toolCallId: text(raw, 'toolCallId'), result: raw['result'], isError: raw['isError'] === true };
    case 'error': {
      const error = record(raw['error'], 'error');
      const retryAfter = raw['retryAfter'];
      return {
        type: 'error',
        error: { code: text(error, 'code'), message: text(error, 'message') },
        recoverable: raw['recoverable'] === true,
        ...(typeof retryAfter === 'number' ? { retryAfter } : {}),
      };
    }
    case 'done': {
      const usage = raw['usage'];
      if (usage === undefined || usage === null) return { type: 'done', reason: text(raw, 'reason') };
      const u = record(usage, 'usage');
      return {
        type: 'done',
        reason: text(raw, 'reason'),
        usage: { promptTokens: count(u, 'promptTokens'), completionTokens: count(u, 'completionTokens'), totalTokens: count(u, 'totalTokens') },
      };
    }
    default:
      return { type: 'unknown', raw: JSON.stringify(raw) };
  }
}

/** @param {unknown} value @returns {Action} */
export function checkAction(value) {
  const raw = record(value, 'action');
  for (const key of ['tool', 'argumentsText', 'digest', 'risk', 'requestedAt', 'expiresAt', 'summary', 'toolCallId', 'generationId']) {
    if (raw[key] !== undefined && raw[key] !== null) text(raw, key);
  }
  const action = { .../** @type {any} */ (raw), actionId: text(raw, 'actionId'), state: text(raw, 'state'), version: count(raw, 'version') };
  // A null says "none": the rest of the code knows only one way of being absent.
  for (const key of Object.keys(action)) if (action[key] === null && key !== 'result') delete action[key];
  return action;
}

/** @param {unknown} value @returns {Notice} */
function notice(value) {
  const raw = record(value, 'notice');
  switch (raw['type']) {
    case 'action':
      return { ...checkAction(raw), type: 'action' };
    case 'restart':
      return { type: 'restart', attempt: count(raw, 'attempt'), supersededFrom: count(raw, 'supersededFrom') };
    case 'cancel_requested':
      return { type: 'cancel_requested', ...(raw['actor'] ? { actor: /** @type {Actor} */ (record(raw['actor'], 'actor')) } : {}) };
    default:
      return { type: 'unknown', raw: JSON.stringify(raw) };
  }
}

/** @param {unknown} value @returns {Entry} */
function entry(value) {
  const raw = record(value, 'entry');
  const head = { offset: count(raw, 'offset'), attempt: countOr(raw, 'attempt', 1), at: textOrNull(raw, 'at') ?? '' };
  if (raw['chunk'] !== undefined) return { ...head, chunk: chunk(raw['chunk']) };
  if (raw['notice'] !== undefined) return { ...head, notice: notice(raw['notice']) };
  throw new Malformed('entry has neither chunk nor notice');
}

/** @param {unknown} value @param {string} where @returns {unknown[]} */
function list(value, where) {
  if (!Array.isArray(value)) throw new Malformed(`${where} is not a list`);
  return value;
}

/** @param {Raw} raw @returns {Frame | null} */
function frame(raw) {
  switch (raw['type']) {
    case 'welcome':
      return {
        type: 'welcome',
        epoch: textOrNull(raw, 'epoch'),
        generation: /** @type {Generation} */ (raw['generation'] === undefined ? {} : record(raw['generation'], 'generation')),
        actions: list(raw['actions'] ?? [], 'actions').map(checkAction),
        firstOffset: countOr(raw, 'firstOffset', 0),
        nextOffset: countOr(raw, 'nextOffset', 0),
        heartbeatSeconds: typeof raw['heartbeatSeconds'] === 'number' && raw['heartbeatSeconds'] > 0 ? raw['heartbeatSeconds'] : 15,
        ...(typeof raw['asOf'] === 'string' ? { asOf: raw['asOf'] } : {}),
        ...(raw['counts'] ? { counts: /** @type {Record<string, number>} */ (record(raw['counts'], 'counts')) } : {}),
      };
    case 'reset':
      return { type: 'reset', reason: text(raw, 'reason'), epoch: textOrNull(raw, 'epoch'), firstOffset: countOr(raw, 'firstOffset', 0) };
    case 'entries':
      return { type: 'entries', entries: list(raw['entries'], 'entries').map(entry) };
    case 'caught_up':
      return { type: 'caught_up', nextOffset: countOr(raw, 'nextOffset', 0) };
    case 'heartbeat':
      return { type: 'heartbeat', nextOffset: raw['nextOffset'] === undefined || raw['nextOffset'] === null ? null : count(raw, 'nextOffset') };
    case 'decided':
      return {
        type: 'decided',
        requestId: textOrNull(raw, 'requestId') ?? '',
        replayed: raw['replayed'] === true,
        alreadyDecided: raw['alreadyDecided'] === true,
        decision: /** @type {Decision} */ (record(raw['decision'], 'decision')),
        action: checkAction(raw['action']),
      };
    case 'cancel_accepted':
      return { type: 'cancel_accepted' };
    case 'error': {
      const requestId = textOrNull(raw, 'requestId');
      return {
        type: 'error',
        code: text(raw, 'code'),
        detail: textOrNull(raw, 'detail') ?? '',
        ...(requestId === null ? {} : { requestId }),
        ...(raw['action'] ? { action: checkAction(raw['action']) } : {}),
      };
    }
    case 'action':
      return {
        type: 'action',
        action: checkAction(raw['action']),
        ...(raw['counts'] ? { counts: /** @type {Record<string, number>} */ (record(raw['counts'], 'counts')) } : {}),
      };
    default:
      return null;
  }
}

/**
 * Keep a number's own digits where the browser's number would print otherwise (needs the reviver's third argument;
 * a browser without it shows its own number, and the arguments never come this way: they are text).
 * @param {string} _key @param {unknown} value @param {{source?: string} | undefined} context
 */
function keepExact(_key, value, context) {
  return typeof value === 'number' && context?.source !== undefined && String(value) !== context.source ? new ExactNumber(context.source) : value;
}

/**
 * Parse JSON so that no number inside changes its digits.
 * @param {string} source @returns {unknown}
 */
export function parseJsonExactly(source) {
  return JSON.parse(source, /** @type {(key: string, value: any) => any} */ (/** @type {unknown} */ (keepExact)));
}

/**
 * Read one frame. `frame: null` with no problem means a frame of a kind this client doesn't know: skip it.
 * @param {unknown} data what the socket delivered
 * @returns {{frame: Frame | null, problem: string | null}}
 */
export function parseFrame(data) {
  if (typeof data !== 'string') return { frame: null, problem: 'a frame that is not text' };
  try {
    // Revivers cost ten times a plain parse; only results can carry numbers that matter to a person.
    const raw = data.includes('"result"') ? parseJsonExactly(data) : JSON.parse(data);
    return { frame: frame(record(raw, 'frame')), problem: null };
  } catch (fault) {
    return { frame: null, problem: fault instanceof Malformed ? fault.message : 'a frame that is not JSON' };
  }
}
