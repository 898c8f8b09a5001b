// @ts-check
// Against decisions nobody meant: what has only just appeared can't be decided, nor by the click that only brought
// the window forward, nor by a key held down, nor anything risky by Enter.

/** The time a person needs to see that something is there. */
export const SETTLE_MS = 350;

let blurred = !document.hasFocus();
let focusedAt = -Infinity;
let lastPressAt = -Infinity;
let lastKey = '';
let lastRepeated = false;

window.addEventListener('blur', () => {
  blurred = true;
});
window.addEventListener('focus', () => {
  if (blurred) focusedAt = performance.now();
  blurred = false;
});
document.addEventListener('pointerdown', () => {
  lastPressAt = performance.now();
  lastKey = '';
}, { capture: true });
document.addEventListener('keydown', (event) => {
  lastKey = event.key;
  lastRepeated = event.repeat;
  // A held Enter would press a button again and again.
  if (event.repeat && event.key === 'Enter' && event.target instanceof HTMLButtonElement) event.preventDefault();
}, { capture: true });

/** @param {string | undefined} risk */
export function isHigh(risk) {
  return risk !== 'low' && risk !== 'medium';
}

/**
 * Why a press must not count as a decision; null when it may.
 * @param {{shownAt: number, risk: string | undefined, approving: boolean, event: MouseEvent | KeyboardEvent}} press
 * @returns {string | null}
 */
export function refusal({ shownAt, risk, approving, event }) {
  const now = performance.now();
  if (now - shownAt < SETTLE_MS) return 'This has only just appeared. Look, then press again.';
  const pointer = event instanceof MouseEvent && event.detail > 0;
  if (pointer && lastPressAt - focusedAt < SETTLE_MS && lastPressAt >= focusedAt) return 'That click only brought the window forward. Press again to decide.';
  if (pointer && blurred) return 'That click only brought the window forward. Press again to decide.';
  const entered = event instanceof KeyboardEvent ? event.key === 'Enter' : !pointer && lastKey === 'Enter';
  const repeated = event instanceof KeyboardEvent ? event.repeat : !pointer && lastRepeated && lastKey !== '';
  if (repeated) return 'A key held down decides nothing.';
  if (approving && entered && isHigh(risk)) return 'High risk is never approved by Enter. Use the pointer, or Space.';
  return null;
}
