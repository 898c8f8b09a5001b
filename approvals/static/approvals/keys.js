// @ts-check
// The help for the keys, and the switch that turns them off (some speech input types letters).

import { need } from '../streams/dom.js';

const STORE = 'agentsite.keys';

export function keysOn() {
  return localStorage.getItem(STORE) !== 'off';
}

export function wireHelp() {
  const dialog = need('#help', HTMLDialogElement);
  const toggle = need('#keys-on', HTMLInputElement);
  toggle.checked = keysOn();
  toggle.addEventListener('change', () => localStorage.setItem(STORE, toggle.checked ? 'on' : 'off'));
  need('#help-open', HTMLButtonElement).addEventListener('click', () => dialog.showModal());
  need('#help-close', HTMLButtonElement).addEventListener('click', () => dialog.close());
  document.addEventListener('keydown', (event) => {
    const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
    if (event.key === '?' && !typing && keysOn() && !dialog.open) dialog.showModal();
  });
}
