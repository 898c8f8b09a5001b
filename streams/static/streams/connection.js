// @ts-check
// The only place that owns a socket and timers. It asks a pure state what is wanted and makes it so:
// after every event the wish is read again, so nothing that was true before an await is believed after it.

import { parseFrame } from './protocol.js';
import { isOpen } from './link.js';

/** @typedef {import('./link.js').Link} Link */
/** @typedef {import('./protocol.js').Frame} Frame */
/** @typedef {{type: 'start' | 'due' | 'retry_now' | 'continue' | 'wake' | 'reopen' | 'off', at: number}
 *   | {type: 'closed', at: number, serial: number, code: number, reason: string, random: number}
 *   | {type: 'message', at: number, serial: number, frame: Frame} | {type: 'malformed', at: number, problem: string}
 *   | {type: 'tick', at: number}} ConnectionEvent */

/**
 * @typedef {{
 *   path: string,
 *   link: () => Link,
 *   dispatch: (event: ConnectionEvent) => void,
 *   hello: () => Record<string, unknown>,
 *   acked?: () => number | null,
 *   trouble?: () => string | null,
 * }} Options `acked` says the last offset applied, for the server's window; `trouble` names why an open socket is to be given up
 */

const ACK_MS = 100;
const TICK_MS = 500;
/** Opening a socket may hang on a dead network far longer than a person would wait. */
const OPEN_TIMEOUT_MS = 10000;

/** @param {string} path */
export function socketUrl(path) {
  const url = new URL(path, window.location.href);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  return url.href;
}

export class Connection {
  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    /** @type {WebSocket | null} */
    this.socket = null;
    this.serial = 0;
    this.openedAt = 0;
    this.greeted = false;
    this.ackSent = -1;
    /** @type {ReturnType<typeof setTimeout> | null} */
    this.retryTimer = null;
    /** @type {ReturnType<typeof setTimeout> | null} */
    this.ackTimer = null;
    setInterval(() => this.tick(), TICK_MS);
    window.addEventListener('online', () => this.wake());
    document.addEventListener('visibilitychange', () => {
      if (document.visibilityState === 'visible') this.wake();
    });
    window.addEventListener('pageshow', (event) => {
      if (event.persisted) this.wake();
    });
  }

  now() {
    return performance.now();
  }

  start() {
    this.emit({ type: 'start', at: this.now() });
  }

  wake() {
    this.emit({ type: 'wake', at: this.now() });
  }

  tick() {
    const at = this.now();
    if (this.socket !== null && !this.greeted && at - this.openedAt > OPEN_TIMEOUT_MS) {
      this.lost(this.serial, 4000, 'no answer');
    }
    this.emit({ type: 'tick', at });
  }

  /** @param {ConnectionEvent} event */
  emit(event) {
    this.options.dispatch(event);
    this.reconcile();
  }

  /** Send a frame on a socket that is open now; false when there is none. @param {Record<string, unknown>} frame */
  send(frame) {
    if (this.socket === null || this.socket.readyState !== WebSocket.OPEN || !this.greeted) return false;
    this.socket.send(JSON.stringify(frame));
    return true;
  }

  /** Make the world as the state wants it. */
  reconcile() {
    const link = this.options.link();
    if (this.retryTimer !== null) {
      clearTimeout(this.retryTimer);
      this.retryTimer = null;
    }
    if (isOpen(link)) {
      if (this.serial !== link.serial) this.open(link.serial);
      else if (this.socket !== null) {
        const trouble = this.options.trouble?.() ?? null;
        if (trouble !== null) this.lost(link.serial, 4000, trouble);
      }
      return;
    }
    if (this.socket !== null) this.drop();
    if (link.phase === 'waiting') {
      this.retryTimer = setTimeout(() => this.emit({ type: 'due', at: this.now() }), Math.max(0, link.retryAt - this.now()));
    }
  }

  /** @param {number} serial */
  open(serial) {
    this.drop();
    this.serial = serial;
    this.openedAt = this.now();
    this.greeted = false;
    this.ackSent = -1;
    /** @type {WebSocket} */
    let socket;
    try {
      socket = new WebSocket(socketUrl(this.options.path));
    } catch {
      setTimeout(() => this.lost(serial, 4000, 'refused'), 0);
      return;
    }
    this.socket = socket;
    socket.addEventListener('open', () => {
      if (this.socket !== socket) return;
      this.greeted = true;
      socket.send(JSON.stringify({ type: 'hello', protocol: 1, ...this.options.hello() }));
    });
    socket.addEventListener('message', (message) => {
      if (this.socket !== socket) return;
      const { frame, problem } = parseFrame(message.data);
      if (problem !== null) this.emit({ type: 'malformed', at: this.now(), problem });
      else if (frame !== null) this.emit({ type: 'message', at: this.now(), serial, frame });
      this.scheduleAck();
    });
    socket.addEventListener('close', (close) => {
      if (this.socket !== socket) return;
      this.lost(serial, close.code, close.reason);
    });
  }

  /** @param {number} serial @param {number} code @param {string} reason */
  lost(serial, code, reason) {
    this.drop();
    this.emit({ type: 'closed', at: this.now(), serial, code, reason, random: Math.random() });
  }

  /** Let go of the socket; what it still says is not heard. */
  drop() {
    const socket = this.socket;
    this.socket = null;
    if (socket !== null && socket.readyState < WebSocket.CLOSING) socket.close(1000);
  }

  scheduleAck() {
    if (!this.options.acked || this.ackTimer !== null) return;
    this.ackTimer = setTimeout(() => {
      this.ackTimer = null;
      const offset = this.options.acked?.() ?? null;
      if (offset !== null && offset >= 0 && offset !== this.ackSent && this.send({ type: 'ack', offset })) this.ackSent = offset;
    }, ACK_MS);
  }
}
