// @ts-check
// The log as a screen needs it: a pure fold over entries. The same entries give the same fold in any slicing;
// an entry that was applied before changes nothing, and one that skips a place is never applied.

/** @typedef {import('./protocol.js').Entry} Entry */
/** @typedef {import('./protocol.js').Action} Action */
/** @typedef {import('./protocol.js').Actor} Actor */
/** @typedef {import('./protocol.js').Usage} Usage */

/** @typedef {{key: string, kind: 'text', offset: number, attempt: number, struck: boolean, text: string, marks: ReadonlyArray<readonly [number, number]>, closed: boolean}} TextItem marks: [offset, where it begins in text] */
/** @typedef {{key: string, kind: 'call', offset: number, attempt: number, struck: boolean, id: string, name: string, arguments: string}} CallItem */
/** @typedef {{key: string, kind: 'result', offset: number, attempt: number, struck: boolean, toolCallId: string, tool: string, result: unknown, isError: boolean}} ResultItem */
/** @typedef {{key: string, kind: 'error', offset: number, attempt: number, struck: boolean, code: string, message: string, recoverable: boolean}} ErrorItem */
/** @typedef {{key: string, kind: 'action', offset: number, attempt: number, struck: boolean, actionId: string}} ActionItem */
/** @typedef {{key: string, kind: 'mark', offset: number, attempt: number, struck: boolean, words: string}} MarkItem a thin rule with words */
/** @typedef {{key: string, kind: 'done', offset: number, attempt: number, struck: boolean, reason: string}} DoneItem */
/** @typedef {TextItem | CallItem | ResultItem | ErrorItem | ActionItem | MarkItem | DoneItem} Item */

/**
 * @typedef {{
 *   next: number, attempt: number, items: readonly Item[], actions: Readonly<Record<string, Action>>,
 *   received: number, tokens: number, toolsRun: number, lastKind: string,
 *   ended: {reason: string, usage: Usage | null, offset: number} | null,
 *   lastError: {code: string, message: string, recoverable: boolean} | null,
 *   cancelledBy: Actor | null, cancelRequested: boolean
 * }} Fold
 */

const BLOCK = 2000; // characters after which a block closes at the next line end
const BLOCK_HARD = 8000; // and after which it closes wherever it is

/** @returns {Fold} */
export function emptyFold(next = 0) {
  return {
    next, attempt: 1, items: [], actions: {}, received: 0, tokens: 0, toolsRun: 0, lastKind: '',
    ended: null, lastError: null, cancelledBy: null, cancelRequested: false,
  };
}

/** States in which an action still holds a run open. */
export const OPEN_STATES = new Set(['pending', 'approved', 'executing']);

/** @param {Fold} fold @returns {Action[]} */
export function openActions(fold) {
  return Object.values(fold.actions).filter((action) => OPEN_STATES.has(action.state));
}

/** The text that stands: what was superseded is not part of it. @param {Fold} fold @returns {string} */
export function standingText(fold) {
  return fold.items.map((item) => (item.kind === 'text' && !item.struck ? item.text : '')).join('');
}

/**
 * Take in what is known of an action, unless something newer is known.
 * @param {Readonly<Record<string, Action>>} actions @param {Action} action
 * @param {boolean} whole a full representation replaces an equal version; a notice doesn't
 */
export function mergeAction(actions, action, whole) {
  const known = actions[action.actionId];
  if (known && (whole ? action.version < known.version : action.version <= known.version)) return actions;
  const merged = { ...known, ...action };
  // A notice names arguments by digest only: a text that has another digest is not what would run.
  if (known && action.argumentsText === undefined && action.digest !== undefined && action.digest !== known.digest) delete merged.argumentsText;
  return { ...actions, [action.actionId]: merged };
}

/** A working copy: filled inside one call of `applyEntries`, frozen by convention when it leaves. */
/** @typedef {{-readonly [K in keyof Fold]: Fold[K]} & {items: Item[]}} Draft */

/** @param {string} text @param {number} length already in the block @returns {number} where to cut, or -1 */
function cutAt(text, length) {
  if (length + text.length < BLOCK) return -1;
  const line = text.indexOf('\n', Math.max(0, BLOCK - length - 1));
  if (line >= 0) return line + 1;
  return length + text.length >= BLOCK_HARD ? text.length : -1;
}

/** @param {Draft} draft @param {number} offset @param {number} attempt @param {string} content */
function addText(draft, offset, attempt, content) {
  let rest = content;
  let part = 0;
  do {
    const last = draft.items.at(-1);
    const open = last?.kind === 'text' && !last.struck && !last.closed && last.attempt === attempt ? last : null;
    const cut = cutAt(rest, open ? open.text.length : 0);
    const piece = cut < 0 ? rest : rest.slice(0, cut);
    if (open) {
      draft.items[draft.items.length - 1] = { ...open, text: open.text + piece, marks: [...open.marks, [offset, open.text.length]], closed: cut >= 0 };
    } else {
      draft.items.push({ key: `t${offset}.${part}`, kind: 'text', offset, attempt, struck: false, text: piece, marks: [[offset, 0]], closed: cut >= 0 });
    }
    part += 1;
    rest = cut < 0 ? '' : rest.slice(cut);
  } while (rest !== '');
}

/** Strike what was written from `from` on; a block that straddles it is split. @param {Draft} draft @param {number} from @param {number} attempt */
function strike(draft, from, attempt) {
  /** @type {Item[]} */
  const items = [];
  for (const item of draft.items) {
    if (item.kind === 'action' || item.kind === 'mark' || item.struck) items.push(item);
    else if (item.kind !== 'text') items.push(item.offset >= from ? { ...item, struck: true } : item);
    else {
      const gone = item.marks.find(([offset]) => offset >= from);
      if (!gone) {
        items.push(item.closed ? item : { ...item, closed: true });
      } else if (gone[1] === 0) {
        items.push({ ...item, struck: true, closed: true });
      } else {
        const [offset, start] = gone;
        items.push({ ...item, text: item.text.slice(0, start), marks: item.marks.filter((mark) => mark[0] < from), closed: true });
        items.push({
          key: `${item.key}~${attempt}`, kind: 'text', offset, attempt: item.attempt, struck: true, closed: true,
          text: item.text.slice(start),
          marks: item.marks.filter((mark) => mark[0] >= from).map((mark) => /** @type {const} */ ([mark[0], mark[1] - start])),
        });
      }
    }
  }
  draft.items = items;
  const standing = new Set();
  let toolsRun = 0;
  for (const item of items) {
    if (item.kind === 'text' && !item.struck) for (const mark of item.marks) standing.add(mark[0]);
    if (item.kind === 'result' && ran(item.result, item.isError)) toolsRun += 1;
  }
  draft.tokens = standing.size;
  draft.toolsRun = toolsRun; // a tool that ran did run, also when its attempt was superseded
}

const REFUSALS = new Set(['rejected', 'expired', 'cancelled', 'unknown']);

/** A refusal is told to the model as a result too, but nothing ran. @param {unknown} result @param {boolean} isError */
function ran(result, isError) {
  const code = isError && typeof result === 'object' && result !== null ? /** @type {{code?: unknown}} */ (result).code : undefined;
  return !(typeof code === 'string' && REFUSALS.has(code));
}

/** The tool of the newest call with this id. @param {readonly Item[]} items @param {string} callId @returns {string} */
function toolOf(items, callId) {
  const call = items.findLast((item) => item.kind === 'call' && item.id === callId);
  return call?.kind === 'call' ? call.name : '';
}

/** @param {Draft} draft @param {Entry} entry */
function applyOne(draft, entry) {
  const { offset, attempt } = entry;
  const base = { offset, attempt, struck: false };
  if (entry.chunk) {
    const chunk = entry.chunk;
    draft.lastKind = chunk.type;
    switch (chunk.type) {
      case 'text':
        addText(draft, offset, attempt, chunk.content);
        draft.received += 1;
        draft.tokens += 1;
        draft.lastError = null;
        break;
      case 'tool_call':
        draft.items.push({ ...base, key: `c${offset}`, kind: 'call', id: chunk.id, name: chunk.name, arguments: chunk.arguments });
        draft.lastError = null;
        break;
      case 'tool_result':
        draft.items.push({ ...base, key: `r${offset}`, kind: 'result', toolCallId: chunk.toolCallId, tool: toolOf(draft.items, chunk.toolCallId), result: chunk.result, isError: chunk.isError });
        if (ran(chunk.result, chunk.isError)) draft.toolsRun += 1;
        draft.lastError = null;
        break;
      case 'error':
        draft.lastError = { code: chunk.error.code, message: chunk.error.message, recoverable: chunk.recoverable };
        draft.items.push({ ...base, key: `e${offset}`, kind: 'error', ...draft.lastError });
        break;
      case 'done':
        draft.ended = { reason: chunk.reason, usage: chunk.usage ?? null, offset };
        draft.items.push({ ...base, key: `d${offset}`, kind: 'done', reason: chunk.reason });
        break;
      case 'unknown':
        draft.items.push({ ...base, key: `u${offset}`, kind: 'mark', words: `Something this page does not know: ${chunk.raw}` });
    }
  } else {
    const notice = entry.notice;
    switch (notice.type) {
      case 'action': {
        const { type: _type, ...action } = notice;
        if (!draft.items.some((item) => item.kind === 'action' && item.actionId === action.actionId)) {
          draft.items.push({ ...base, key: `a${action.actionId}`, kind: 'action', actionId: action.actionId });
        }
        draft.actions = mergeAction(draft.actions, action, false);
        break;
      }
      case 'restart':
        strike(draft, notice.supersededFrom, notice.attempt);
        draft.attempt = notice.attempt;
        draft.lastError = null;
        draft.items.push({ ...base, key: `m${offset}`, kind: 'mark', words: `Attempt ${notice.attempt} starts here; what was struck above no longer counts` });
        break;
      case 'cancel_requested':
        draft.cancelRequested = true;
        draft.cancelledBy = notice.actor ?? null;
        draft.items.push({ ...base, key: `m${offset}`, kind: 'mark', words: `Stop asked${notice.actor ? ` by ${notice.actor.name}` : ''}` });
        break;
      case 'unknown':
        draft.items.push({ ...base, key: `u${offset}`, kind: 'mark', words: `Something this page does not know: ${notice.raw}` });
    }
  }
  draft.attempt = Math.max(draft.attempt, attempt);
  draft.next = offset + 1;
}

/**
 * Apply what is new. `gap` is the offset that should have come when one was skipped: nothing after it is applied,
 * the caller asks again from `fold.next`.
 * @param {Fold} fold @param {readonly Entry[]} entries
 * @returns {{fold: Fold, fresh: number, freshTokens: number, gap: number | null}}
 */
export function applyEntries(fold, entries) {
  /** @type {Draft} */
  const draft = { ...fold, items: [...fold.items] };
  let fresh = 0;
  let gap = null;
  for (const entry of entries) {
    if (entry.offset < draft.next) continue;
    if (entry.offset > draft.next) {
      gap = draft.next;
      break;
    }
    applyOne(draft, entry);
    fresh += 1;
  }
  return fresh === 0 ? { fold, fresh, freshTokens: 0, gap } : { fold: draft, fresh, freshTokens: draft.received - fold.received, gap };
}

/**
 * Put a card at the end for each open action whose own place in the log is not held any more (pruned).
 * @param {Fold} fold @returns {Fold}
 */
export function placeMissing(fold) {
  const placed = new Set(fold.items.flatMap((item) => (item.kind === 'action' ? [item.actionId] : [])));
  const missing = openActions(fold).filter((action) => !placed.has(action.actionId));
  if (missing.length === 0) return fold;
  /** @type {Item[]} */
  const cards = missing.map((action) => ({ key: `a${action.actionId}`, kind: 'action', offset: fold.next, attempt: fold.attempt, struck: false, actionId: action.actionId }));
  return { ...fold, items: [...fold.items, ...cards] };
}

/** Draw a thin rule here, of the client's own making. @param {Fold} fold @param {string} key @param {string} words @returns {Fold} */
export function ruled(fold, key, words) {
  return { ...fold, items: [...fold.items, { key, kind: 'mark', offset: fold.next, attempt: fold.attempt, struck: false, words }] };
}
