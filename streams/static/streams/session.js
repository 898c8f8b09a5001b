// @ts-check
// One run as a screen sees it: a pure `(state, event) → state`. No clock, no socket, no DOM: time comes in with the
// events, and so does chance. `describe` names the state (eight names), says it in a sentence, and lists what one may do.

import { applyEntries, emptyFold, mergeAction, openActions, placeMissing, ruled } from './fold.js';
import { ATTEMPTS, closeWords, isOpen, linkOff, reduceLink, silentMs } from './link.js';

/** @typedef {import('./protocol.js').Frame} Frame */
/** @typedef {import('./protocol.js').Action} Action */
/** @typedef {import('./fold.js').Fold} Fold */
/** @typedef {import('./link.js').Link} Link */
/** @typedef {import('./link.js').LinkEvent} LinkEvent */
/** @typedef {'idle' | 'connecting' | 'streaming' | 'stalled' | 'retrying' | 'done' | 'cancelled' | 'error'} Name */
/** @typedef {'start' | 'stop' | 'reconnect' | 'retry_now' | 'continue' | 'start_again' | 'permalink' | 'details' | 'sign_in'} Verb */
/** @typedef {{verb: Verb, label: string}} Choice */

/**
 * @typedef {{
 *   me: string | null, link: Link, fold: Fold, epoch: string | null, now: number,
 *   startedAt: number | null, ttfbMs: number | null, lastEntryAt: number | null,
 *   recent: ReadonlyArray<readonly [number, number]>,
 *   caughtUp: boolean, resumedAt: number | null, stop: 'no' | 'wanted' | 'sent' | 'accepted',
 *   gap: number | null, behindAt: number | null, problems: readonly string[]
 * }} Session `gap`: ask again from here; `behindAt`: where we stood when a heartbeat said there is more
 */
/**
 * @typedef {LinkEvent | {type: 'message', at: number, serial: number, frame: Frame} | {type: 'malformed', at: number, problem: string}
 *   | {type: 'tick', at: number} | {type: 'stop', at: number} | {type: 'stop_sent', at: number} | {type: 'stop_accepted', at: number}
 *   | {type: 'start_again', at: number} | {type: 'action', at: number, action: Action}} SessionEvent
 */

/** Silence after which a run that should be talking is called stalled. */
export const QUIET_MS = 4000;
const RATE_WINDOW_MS = 2000;

/** @param {string | null} me the id of the person who looks @returns {Session} */
export function newSession(me = null) {
  return {
    me, link: linkOff(), fold: emptyFold(), epoch: null, now: 0, startedAt: null, ttfbMs: null, lastEntryAt: null, recent: [],
    caughtUp: false, resumedAt: null, stop: 'no', gap: null, behindAt: null, problems: [],
  };
}

/** @param {Session} state @param {string} words @returns {readonly string[]} */
function noted(state, words) {
  return [...state.problems.slice(-19), words];
}

/** @param {Session} state @param {Frame} frame @param {number} at @returns {Session} */
function onFrame(state, frame, at) {
  switch (frame.type) {
    case 'welcome': {
      const renamed = state.epoch !== null && frame.epoch !== null && frame.epoch !== state.epoch;
      // A log that was born again: nothing we hold means anything in it. (The server says `reset` too; this is for one that forgot.)
      let fold = renamed ? emptyFold(frame.firstOffset) : state.fold;
      if (fold.next > 0 && fold.items.length > 0 && state.link.reconnects > 0) {
        fold = ruled(fold, `resume${state.link.serial}`, `Resumed at entry ${fold.next}`);
      }
      let actions = fold.actions;
      for (const action of frame.actions) actions = mergeAction(actions, action, true);
      return { ...state, fold: { ...fold, actions }, epoch: frame.epoch ?? state.epoch, resumedAt: fold.next, caughtUp: false, gap: null };
    }
    case 'reset': {
      const words = frame.reason === 'pruned' ? `Entries before ${frame.firstOffset} are no longer kept` : 'The log began anew; what was here is void';
      const fold = ruled({ ...emptyFold(frame.firstOffset), actions: state.fold.actions }, `reset${state.link.serial}`, words);
      return { ...state, fold, epoch: frame.epoch ?? state.epoch, caughtUp: false, gap: null };
    }
    case 'entries': {
      const { fold, fresh, freshTokens, gap } = applyEntries(state.fold, frame.entries);
      if (fresh === 0 && gap === null) return state;
      const recent = freshTokens === 0 ? state.recent : [...state.recent, /** @type {const} */ ([at, freshTokens])];
      return {
        ...state, fold, gap, recent: recent.filter(([when]) => at - when <= RATE_WINDOW_MS),
        lastEntryAt: fresh > 0 ? at : state.lastEntryAt,
        ttfbMs: state.ttfbMs ?? (state.startedAt === null ? null : at - state.startedAt),
        problems: gap === null ? state.problems : noted(state, `Entry ${gap} was missing; asked again from there`),
      };
    }
    case 'caught_up':
      return { ...state, caughtUp: true, fold: placeMissing(state.fold), lastEntryAt: at };
    case 'decided':
    case 'action':
      return { ...state, fold: { ...state.fold, actions: mergeAction(state.fold.actions, frame.action, false) } };
    case 'cancel_accepted':
      return { ...state, stop: 'accepted' };
    case 'error': {
      const actions = frame.action ? mergeAction(state.fold.actions, frame.action, false) : state.fold.actions;
      return { ...state, fold: { ...state.fold, actions }, problems: noted(state, `${frame.code}: ${frame.detail}`) };
    }
    case 'heartbeat':
      // A heartbeat never moves the cursor. Two in a row that say there is more than we were given show that something
      // was missed; one alone may just have overtaken the entries.
      if (!state.caughtUp || frame.nextOffset === null || frame.nextOffset <= state.fold.next) return { ...state, behindAt: null };
      return { ...state, behindAt: state.fold.next, gap: state.behindAt === state.fold.next ? state.fold.next : null };
  }
}

/** @param {Session} state @param {SessionEvent} event @returns {Session} */
export function reduce(state, event) {
  const seen = { ...state, now: Math.max(state.now, event.at) };
  switch (event.type) {
    case 'message': {
      if (event.serial !== state.link.serial || !isOpen(state.link)) return state;
      const frame = event.frame;
      const link = reduceLink(state.link, {
        type: 'frame', at: event.at, serial: event.serial, kind: frame.type,
        ...(frame.type === 'welcome' ? { heartbeatSeconds: frame.heartbeatSeconds } : {}),
      });
      return onFrame({ ...seen, link }, frame, event.at);
    }
    case 'malformed':
      return { ...seen, problems: noted(state, event.problem) };
    case 'tick':
      return { ...seen, recent: seen.recent.filter(([when]) => event.at - when <= RATE_WINDOW_MS) };
    case 'stop':
      return over(state) || state.stop !== 'no' ? seen : { ...seen, stop: 'wanted' };
    case 'stop_sent':
      return state.stop === 'wanted' ? { ...seen, stop: 'sent' } : seen;
    case 'stop_accepted':
      return { ...seen, stop: 'accepted' };
    case 'action':
      return { ...seen, fold: { ...seen.fold, actions: mergeAction(seen.fold.actions, event.action, true) } };
    case 'start_again': {
      const fresh = newSession(state.me);
      return { ...fresh, now: seen.now, startedAt: event.at, link: reduceLink({ ...state.link, phase: 'failed' }, { type: 'continue', at: event.at }) };
    }
    case 'closed': {
      if (event.serial !== state.link.serial) return state;
      // A log that can't change any more needs no socket.
      const link = reduceLink(state.link, settled(state) ? { type: 'off', at: event.at } : event);
      // Asked but not answered: the line broke, so ask again on the next one.
      const stop = state.stop === 'sent' ? 'wanted' : state.stop;
      const words = `Closed (${event.code}) at token ${state.fold.tokens}: ${closeWords(event.code, event.reason)}`;
      return { ...seen, link, stop, caughtUp: false, gap: null, behindAt: null, problems: noted(state, words) };
    }
    default: {
      const link = reduceLink(state.link, event);
      const left = link.serial !== state.link.serial || !isOpen(link);
      return { ...seen, link, startedAt: seen.startedAt ?? (event.type === 'start' ? event.at : null), caughtUp: left ? false : state.caughtUp, gap: null };
    }
  }
}

/** The log has its end and nothing in it can change by itself any more. @param {Session} state */
export function settled(state) {
  return state.fold.ended !== null && openActions(state.fold).length === 0;
}

/** @param {Session} state */
function over(state) {
  return state.fold.ended !== null;
}

/** The agent is silent because a person or a tool is at work, not because something broke. @param {Session} state */
function waits(state) {
  return (state.fold.lastKind === 'tool_call' || state.fold.lastKind === 'tool_result') && openActions(state.fold).length > 0;
}

/** Tokens a second over the last two seconds. @param {Session} state */
export function rate(state) {
  const total = state.recent.reduce((sum, [when, n]) => (state.now - when <= RATE_WINDOW_MS ? sum + n : sum), 0);
  return Math.round((total * 1000) / RATE_WINDOW_MS);
}

/** Milliseconds of silence that the state should be judged by. @param {Session} state */
function quietMs(state) {
  const silent = silentMs(state.link, state.now);
  if (silent >= 2 * state.link.heartbeatMs) return silent;
  if (state.link.phase !== 'live' || over(state) || waits(state) || state.fold.next === 0) return 0;
  return state.lastEntryAt === null ? 0 : state.now - state.lastEntryAt;
}

/** The socket is open but dead: nothing came in two heartbeats and a moment more. @param {Session} state */
export function frozen(state) {
  return silentMs(state.link, state.now) >= 2 * state.link.heartbeatMs + 1000;
}

/** May a person press Approve here? Only on what the log says now. @param {Session} state */
export function buttonsLive(state) {
  return state.caughtUp && state.link.phase === 'live';
}

/** @param {number} n @param {string} one @param {string} many */
function counted(n, one, many) {
  return `${n} ${n === 1 ? one : many}`;
}

/** @param {Session} state @returns {string} */
function stopped(state) {
  const { cancelledBy, tokens, toolsRun } = state.fold;
  const who = cancelledBy === null ? '' : cancelledBy.kind === 'person' && cancelledBy.id === state.me ? ' by you' : ` by ${cancelledBy.name}`;
  const tools = toolsRun === 0 ? 'No tool had run' : `${counted(toolsRun, 'tool', 'tools')} had already run`;
  return `Stopped${who} at token ${tokens}. ${tools}`;
}

/**
 * @typedef {{name: Name, sentence: string, choices: Choice[], busy: boolean}} Description
 * @param {Session} state @returns {Description}
 */
export function describe(state) {
  const { link, fold } = state;
  const stop = /** @type {Choice} */ ({ verb: 'stop', label: state.stop === 'no' ? 'Stop' : 'Stopping…' });
  const permalink = /** @type {Choice} */ ({ verb: 'permalink', label: 'Permalink' });
  /** @param {Name} name @param {string} sentence @param {Choice[]} choices @param {boolean} busy */
  const say = (name, sentence, choices, busy) => ({ name, sentence, choices, busy });

  if (fold.ended !== null) {
    const open = openActions(fold);
    const rest = open.length > 0 ? ` · ${counted(open.length, 'action', 'actions')} still open` : '';
    if (fold.ended.reason === 'cancel') return say('cancelled', stopped(state) + rest, [permalink], false);
    if (fold.ended.reason === 'error') {
      const why = fold.lastError ? `${fold.lastError.code}: ${fold.lastError.message}` : 'no reason given';
      return say('error', `The agent ended with an error at token ${fold.tokens}: ${why}${rest}`, [permalink, { verb: 'details', label: 'Details' }], false);
    }
    const usage = fold.ended.usage ? `${fold.ended.usage.totalTokens} tokens used` : `${counted(fold.tokens, 'token', 'tokens')}`;
    return say('done', `Finished: ${fold.ended.reason} · ${usage}${rest}`, [permalink], false);
  }
  switch (link.phase) {
    case 'off':
      return say('idle', 'Not started', [{ verb: 'start', label: 'Start' }], false);
    case 'opening':
    case 'replaying':
      if (silentMs(link, state.now) >= 2 * link.heartbeatMs) break;
      return say('connecting', `Connecting, attempt ${link.attempt} of ${ATTEMPTS}`, [stop], true);
    case 'waiting': {
      const why = `Connection closed (${link.closeCode ?? 'no code'}) at token ${fold.tokens}`;
      return say('retrying', `${why}. Retrying in ${link.delayMs} ms (attempt ${link.attempt} of ${ATTEMPTS})`, [stop, { verb: 'retry_now', label: 'Retry now' }], true);
    }
    case 'failed': {
      const why = closeWords(link.closeCode, link.closeReason);
      const details = /** @type {Choice} */ ({ verb: 'details', label: 'Details' });
      if (link.closeCode === 4401) return say('error', `Closed at token ${fold.tokens}: ${why}`, [{ verb: 'sign_in', label: 'Sign in' }, details], false);
      if (link.final) return say('error', `Closed at token ${fold.tokens}: ${why}`, [details], false);
      return say('error', `Gave up after ${ATTEMPTS} attempts at token ${fold.tokens}: ${why}`, [
        { verb: 'continue', label: `Continue from token ${fold.tokens}` }, { verb: 'start_again', label: 'Start again' }, details,
      ], false);
    }
    case 'live':
  }
  const quiet = quietMs(state);
  if (quiet >= QUIET_MS) {
    return say('stalled', `No data for ${Math.floor(quiet / 1000)} s. The connection is open`, [stop, { verb: 'reconnect', label: 'Reconnect' }], true);
  }
  if (fold.cancelRequested || state.stop !== 'no') return say('streaming', 'Live · stopping', [stop], true);
  const open = openActions(fold);
  const pending = open.filter((action) => action.state === 'pending').length;
  if (waits(state)) {
    const what = pending > 0 ? `${counted(pending, 'action waits', 'actions wait')} for a person` : `${counted(open.length, 'action is', 'actions are')} at work`;
    return say('streaming', `Live · ${what}`, [stop], true);
  }
  if (fold.lastError?.recoverable) return say('retrying', `The agent met ${fold.lastError.code} at token ${fold.tokens} and tries again`, [stop], true);
  return say('streaming', `Live · ${rate(state)} tokens/s`, [stop], true);
}
