// @ts-check
// Text from an agent, made safe to believe: what the eye can't see is written out, and what looks like something
// else is flagged. Nothing here makes HTML; callers only ever set `textContent`. The server's templates hold the same rule
// (streams/safetext.py), and tests/js/safetext.json holds both to it.

/** @typedef {'invisible' | 'mixed'} Flag */

/**
 * Control, format (bidi marks, zero width, tags), separators that break lines unseen, fillers, private and unassigned-looking
 * places. Newline and tab stay in long text.
 */
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}\u034F\u115F\u1160\u17B4\u17B5\u180B-\u180F\u2800\u3164\uFFA0\uFE00-\uFE0F\u{E0100}-\u{E01EF}\u00A0\u1680\u2000-\u200A\u202F\u205F\u3000]/gu;

/** @param {string} character @returns {string} */
export function escapeOf(character) {
  const code = /** @type {number} */ (character.codePointAt(0));
  return `‹U+${code.toString(16).toUpperCase().padStart(4, '0')}›`;
}

/**
 * Write out whatever would not be seen. `lines` keeps newline and tab as they are (for text shown in lines).
 * `emoji` keeps the joiners and selectors inside emoji, for prose only: never for arguments.
 * @param {string} text @param {{lines?: boolean, emoji?: boolean}} [options]
 */
export function visible(text, options = {}) {
  return text.replace(HIDDEN, (character, index) => {
    if (options.lines && (character === '\n' || character === '\t')) return character;
    if (options.lines && character === '\r' && text[index + 1] === '\n') return '';
    if (options.emoji && inEmoji(text, index, character)) return character;
    return escapeOf(character);
  });
}

/** @param {string} text @param {number} index @param {string} character */
function inEmoji(text, index, character) {
  const before = text.slice(Math.max(0, index - 4), index);
  const after = text.slice(index + character.length, index + character.length + 4);
  if (character === '\uFE0F') return /[\p{Extended_Pictographic}0-9#*]$/u.test(before);
  if (character === '\u200D') return /(\p{Extended_Pictographic}|\p{Emoji_Modifier})\uFE0F?$/u.test(before) && /^\p{Extended_Pictographic}/u.test(after);
  return false;
}

/** @param {string} text */
export function hasHidden(text) {
  for (const [character] of text.matchAll(HIDDEN)) if (character !== '\n' && character !== '\t' && character !== '\r') return true;
  return false;
}

const SCRIPTS = /** @type {const} */ ([
  ['Latin', /\p{Script=Latin}/u], ['Cyrillic', /\p{Script=Cyrillic}/u], ['Greek', /\p{Script=Greek}/u], ['Armenian', /\p{Script=Armenian}/u],
  ['Cherokee', /\p{Script=Cherokee}/u], ['Hebrew', /\p{Script=Hebrew}/u], ['Arabic', /\p{Script=Arabic}/u],
]);
/** Letters that pass for Latin ones though no other script is near: full width and mathematical. */
const LOOKALIKE = /[\uFF21-\uFF3A\uFF41-\uFF5A\u{1D400}-\u{1D7FF}]/u;

/**
 * Words (runs of letters, digits, dots, dashes) that mix scripts which look alike.
 * @param {string} text @returns {string[]}
 */
export function mixedWords(text) {
  const found = [];
  for (const [word] of text.matchAll(/[\p{L}\p{M}\p{N}._-]+/gu)) {
    const scripts = SCRIPTS.filter(([, pattern]) => pattern.test(word));
    if (scripts.length > 1 || LOOKALIKE.test(word)) found.push(word);
  }
  return found;
}

/** Combining marks that were typed apart from their letter: another spelling of the same sight. @param {string} text */
export function decomposed(text) {
  return text.normalize('NFC') !== text;
}

/** A mixed word with the letters that only look Latin named by number. @param {string} word */
function spelled(word) {
  const odd = [...new Set(Array.from(word).filter((letter) => /\p{L}/u.test(letter) && !/[\u0000-\u024F]/.test(letter)))].slice(0, 5);
  return `${visible(word)} (${odd.map((letter) => `${letter} is ${escapeOf(letter).slice(1, -1)}`).join(', ')})`;
}

/**
 * What a person must be warned of, in words.
 * @param {string} text @returns {string[]}
 */
export function warnings(text) {
  const said = [];
  if (hasHidden(text)) said.push('Contains characters that can’t be seen; they are written out as ‹U+…›.');
  const mixed = mixedWords(text);
  if (mixed.length > 0) said.push(`Letters of different alphabets are mixed in: ${mixed.slice(0, 3).map(spelled).join(', ')}.`);
  if (decomposed(text)) said.push('Spelled with separate accents: it looks like other text that is not the same.');
  return said;
}
