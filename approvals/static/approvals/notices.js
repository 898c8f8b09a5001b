// @ts-check
// Opt-in: a notification, with a sound of its own, for "someone waits for you", while the page is not in front.

import { need, setText } from '../streams/dom.js';

const STORE = 'agentsite.notices';

/** Two soft tones, made here: no file to fetch, no other sound like it. */
function chime() {
  const context = new AudioContext();
  for (const [index, pitch] of [523, 784].entries()) {
    const tone = context.createOscillator();
    const volume = context.createGain();
    tone.frequency.value = pitch;
    volume.gain.setValueAtTime(0.08, context.currentTime + index * 0.18);
    volume.gain.exponentialRampToValueAtTime(0.001, context.currentTime + index * 0.18 + 0.4);
    tone.connect(volume).connect(context.destination);
    tone.start(context.currentTime + index * 0.18);
    tone.stop(context.currentTime + index * 0.18 + 0.4);
  }
  setTimeout(() => void context.close(), 1200);
}

export function wireNotices() {
  const button = need('#notify', HTMLButtonElement);
  const possible = 'Notification' in window;
  button.hidden = !possible;
  const on = () => possible && Notification.permission === 'granted' && localStorage.getItem(STORE) === 'on';
  const paint = () => {
    button.setAttribute('aria-pressed', String(on()));
    setText(button, on() ? 'Notifications on' : 'Notify me');
  };
  button.addEventListener('click', async () => {
    if (on()) localStorage.setItem(STORE, 'off');
    else if ((await Notification.requestPermission()) === 'granted') localStorage.setItem(STORE, 'on');
    else setText(button, 'The browser refuses notifications');
    if (possible && Notification.permission === 'granted') paint();
  });
  paint();
  return {
    /** @param {string} words */
    someoneWaits(words) {
      if (!on() || document.visibilityState === 'visible') return;
      // One tag: ten requests are one notice, not ten.
      new Notification('Agentsite', { body: words, tag: 'agentsite-waiting' });
      chime();
    },
  };
}
