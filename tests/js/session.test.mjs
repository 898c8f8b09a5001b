import assert from 'node:assert/strict';
import { test } from 'node:test';
import { applyEntries, emptyFold, standingText } from '../../streams/static/streams/fold.js';
import { backoffMs, linkOff, reduceLink } from '../../streams/static/streams/link.js';
import { buttonsLive, describe, frozen, newSession, reduce, settled } from '../../streams/static/streams/session.js';

const ana = { kind: 'person', id: '7', name: 'ana' };
const text = (offset, content, attempt = 1) => ({ offset, attempt, at: '', chunk: { type: 'text', content } });
const chunk = (offset, c, attempt = 1) => ({ offset, attempt, at: '', chunk: c });
const notice = (offset, n, attempt = 1) => ({ offset, attempt, at: '', notice: n });
const words = (from, to) => Array.from({ length: to - from }, (_, i) => text(from + i, `w${from + i} `));

/** A session driven by hand: every step says what time it is. */
class Drive {
  constructor() {
    this.state = newSession('7');
    this.at = 1000;
  }
  do(event) {
    this.state = reduce(this.state, { at: this.at, ...event });
    return this;
  }
  after(ms) {
    this.at += ms;
    return this.do({ type: 'tick' });
  }
  frame(frame) {
    return this.do({ type: 'message', serial: this.state.link.serial, frame });
  }
  entries(...entries) {
    return this.frame({ type: 'entries', entries: entries.flat() });
  }
  close(code, random = 1, reason = '') {
    return this.do({ type: 'closed', serial: this.state.link.serial, code, reason, random });
  }
  welcome(more = {}) {
    return this.frame({ type: 'welcome', epoch: 'E', generation: {}, actions: [], firstOffset: 0, nextOffset: 0, heartbeatSeconds: 15, ...more });
  }
  live() {
    return this.welcome().frame({ type: 'caught_up', nextOffset: this.state.fold.next });
  }
  get said() {
    return describe(this.state);
  }
}
const started = () => new Drive().do({ type: 'start' });

test('idle, connecting, streaming, done: each with its sentence', () => {
  const d = new Drive();
  assert.equal(d.said.name, 'idle');
  assert.equal(d.said.sentence, 'Not started');
  d.do({ type: 'start' });
  assert.equal(d.said.sentence, 'Connecting, attempt 1 of 4');
  d.live().entries(words(0, 76));
  assert.equal(d.said.name, 'streaming');
  assert.equal(d.said.sentence, 'Live · 38 tokens/s');
  d.entries(chunk(76, { type: 'done', reason: 'stop', usage: { promptTokens: 1, completionTokens: 2, totalTokens: 3 } }));
  assert.equal(d.said.sentence, 'Finished: stop · 3 tokens used');
  assert.equal(settled(d.state), true);
});

test('a cut at token 8 is told with code, token, delay and attempt, and the text goes on at 8', () => {
  const d = started().live().entries(words(0, 8)).close(1006);
  assert.equal(d.said.name, 'retrying');
  assert.equal(d.said.sentence, 'Connection closed (1006) at token 8. Retrying in 250 ms (attempt 2 of 4)');
  assert.deepEqual(d.said.choices.map((c) => c.verb), ['stop', 'retry_now']);
  assert.equal(d.state.fold.next, 8);
  d.after(250).do({ type: 'due' });
  assert.equal(d.said.sentence, 'Connecting, attempt 2 of 4');
  d.live().entries(words(8, 12));
  assert.equal(standingText(d.state.fold), words(0, 12).map((e) => e.chunk.content).join(''));
  assert.ok(d.state.fold.items.some((item) => item.kind === 'mark' && item.words === 'Resumed at entry 8'));
});

test('four refusals in a row end in error naming the token, and Continue starts at attempt one', () => {
  const d = started().live().entries(words(0, 8)).close(1006);
  const delays = [d.state.link.delayMs];
  for (const _ of [2, 3, 4]) {
    d.after(d.state.link.delayMs).do({ type: 'due' }).close(1006);
    delays.push(d.state.link.delayMs);
  }
  assert.deepEqual(delays.slice(0, 3), [250, 500, 1000]);
  assert.equal(d.said.name, 'error');
  assert.equal(d.said.sentence, 'Gave up after 4 attempts at token 8: refused');
  assert.deepEqual(d.said.choices.map((c) => c.label), ['Continue from token 8', 'Start again', 'Details']);
  d.do({ type: 'continue' });
  assert.equal(d.said.sentence, 'Connecting, attempt 1 of 4');
  assert.equal(d.state.fold.next, 8);
});

test('the count goes back to one after a healthy while, not on the first token', () => {
  const d = started().close(1006).after(250).do({ type: 'due' }).live().entries(words(0, 3)).close(1006);
  assert.equal(d.state.link.attempt, 3);
  d.after(500).do({ type: 'due' }).live().after(5000).close(1006);
  assert.equal(d.state.link.attempt, 2);
});

test('backoff stays under its bound, and chance spreads it below', () => {
  for (const n of [1, 2, 3, 4, 9]) {
    assert.ok(backoffMs(n, 1) <= Math.min(2000, 250 * 2 ** (n - 1)));
    assert.ok(backoffMs(n, 0.1) < backoffMs(n, 0.9));
  }
});

test('4400 to 4404 are final; 4408 comes back with the offset as if nothing was wrong', () => {
  for (const code of [4400, 4401, 4403, 4404]) {
    const d = started().live().close(code);
    assert.equal(d.said.name, 'error', String(code));
    assert.equal(d.said.choices.some((c) => c.verb === 'continue'), false);
    d.do({ type: 'wake' });
    assert.equal(d.said.name, 'error', 'waking up does not ask again');
  }
  const slow = started().close(1006).after(250).do({ type: 'due' }).live().entries(words(0, 5)).close(4408);
  assert.equal(slow.state.link.attempt, 2);
  assert.equal(slow.state.fold.next, 5);
});

test('doubles and overlaps change nothing; a gap is asked for again, never guessed over', () => {
  const d = started().live().entries(words(0, 5)).entries(words(2, 7));
  assert.equal(standingText(d.state.fold), words(0, 7).map((e) => e.chunk.content).join(''));
  assert.equal(d.state.fold.received, 7);
  d.entries(words(9, 12));
  assert.equal(d.state.gap, 7);
  assert.equal(d.state.fold.next, 7);
  assert.equal(d.state.fold.received, 7);
  d.close(4000, 1, 'entry 7 missing');
  assert.equal(d.state.gap, null);
  assert.equal(d.said.name, 'retrying');
});

test('any slicing of a log gives the same fold', () => {
  const log = [...words(0, 4), chunk(4, { type: 'tool_call', id: 'c', name: 't', arguments: '{}', index: 0 }), notice(5, { type: 'action', actionId: 'A', toolCallId: 'c', state: 'pending', version: 1 }),
    ...words(6, 9), notice(9, { type: 'restart', attempt: 2, supersededFrom: 2 }, 2), ...words(10, 14).map((e) => ({ ...e, attempt: 2 }))];
  const whole = applyEntries(emptyFold(), log).fold;
  for (let cut = 0; cut <= log.length; cut += 1) {
    const half = applyEntries(emptyFold(), log.slice(0, cut)).fold;
    assert.deepEqual(applyEntries(half, log.slice(Math.max(0, cut - 2))).fold, whole);
  }
});

test('a restart strikes what it superseded, splits the block, and keeps it to be seen', () => {
  const { fold } = applyEntries(emptyFold(), [...words(0, 6), notice(6, { type: 'restart', attempt: 2, supersededFrom: 3 }, 2), text(7, 'new', 2)]);
  assert.equal(standingText(fold), 'w0 w1 w2 new');
  assert.equal(fold.tokens, 4);
  assert.equal(fold.received, 7);
  assert.deepEqual(fold.items.filter((i) => i.kind === 'text').map((i) => [i.text, i.struck]), [['w0 w1 w2 ', false], ['w3 w4 w5 ', true], ['new', false]]);
  assert.equal(new Set(fold.items.map((i) => i.key)).size, fold.items.length);
});

test('long text is cut into blocks at line ends and nothing is lost', () => {
  const entries = Array.from({ length: 3000 }, (_, i) => text(i, i % 50 === 49 ? 'end\n' : 'word '));
  const { fold } = applyEntries(emptyFold(), entries);
  assert.ok(fold.items.length > 5);
  assert.equal(standingText(fold), entries.map((e) => e.chunk.content).join(''));
  for (const item of fold.items.slice(0, -1)) assert.ok(item.text.endsWith('\n') && item.text.length < 2600);
});

test('an older version of an action never overwrites a newer one, from a notice or a snapshot', () => {
  const pending = { type: 'action', actionId: 'A', toolCallId: 'c', state: 'pending', version: 1 };
  const d = started().welcome({ actions: [{ actionId: 'A', state: 'done', version: 5, argumentsText: '{"a":1}' }] }).entries(notice(0, pending));
  assert.equal(d.state.fold.actions.A.state, 'done');
  assert.equal(d.state.fold.actions.A.argumentsText, '{"a":1}');
  d.do({ type: 'action', action: { actionId: 'A', state: 'approved', version: 4 } });
  assert.equal(d.state.fold.actions.A.state, 'done');
});

test('buttons live only after caught_up, and die with the line', () => {
  const d = started();
  assert.equal(buttonsLive(d.state), false);
  d.welcome();
  assert.equal(buttonsLive(d.state), false);
  d.frame({ type: 'caught_up', nextOffset: 0 });
  assert.equal(buttonsLive(d.state), true);
  d.close(1006);
  assert.equal(buttonsLive(d.state), false);
});

test('silence while it should talk is stalled after 4 s; silence while a person thinks is not', () => {
  const d = started().live().entries(words(0, 3)).after(3900);
  assert.equal(d.said.name, 'streaming');
  d.after(200);
  assert.equal(d.said.sentence, 'No data for 4 s. The connection is open');
  assert.deepEqual(d.said.choices.map((c) => c.verb), ['stop', 'reconnect']);
  d.entries(chunk(3, { type: 'tool_call', id: 'c', name: 't', arguments: '{}', index: 0 }), notice(4, { type: 'action', actionId: 'A', state: 'pending', version: 1 })).after(9000);
  assert.equal(d.said.sentence, 'Live · 1 action waits for a person');
});

test('a frozen line is stalled within two heartbeats even while a person thinks, and then given up', () => {
  const d = started().welcome({ heartbeatSeconds: 2 }).frame({ type: 'caught_up', nextOffset: 0 })
    .entries(chunk(0, { type: 'tool_call', id: 'c', name: 't', arguments: '{}', index: 0 }), notice(1, { type: 'action', actionId: 'A', state: 'pending', version: 1 }));
  d.after(3000).frame({ type: 'heartbeat', nextOffset: 2 }).after(3900);
  assert.equal(d.said.name, 'streaming');
  d.after(200);
  assert.equal(d.said.name, 'stalled');
  assert.equal(frozen(d.state), false);
  d.after(1000);
  assert.equal(frozen(d.state), true);
});

test('a heartbeat never moves the cursor; two that know more than we do ask again', () => {
  const d = started().live().entries(words(0, 3)).frame({ type: 'heartbeat', nextOffset: 5 });
  assert.equal(d.state.fold.next, 3);
  assert.equal(d.state.gap, null);
  d.frame({ type: 'heartbeat', nextOffset: 5 });
  assert.equal(d.state.gap, 3);
});

test('a reset forgets what was held and says so', () => {
  const d = started().live().entries(words(0, 5)).close(1006).after(250).do({ type: 'due' }).welcome({ epoch: 'F' }).frame({ type: 'reset', reason: 'epoch', epoch: 'F', firstOffset: 0 }).entries(text(0, 'fresh'));
  assert.equal(standingText(d.state.fold), 'fresh');
  assert.equal(d.state.epoch, 'F');
});

test('a frame or a close of an earlier socket is not listened to', () => {
  const d = started().live();
  const old = d.state.link.serial;
  d.close(1006).after(250).do({ type: 'due' });
  const before = d.state;
  d.do({ type: 'message', serial: old, frame: { type: 'entries', entries: words(0, 3) } }).do({ type: 'closed', serial: old, code: 1000, reason: '', random: 1 });
  assert.equal(d.state.fold, before.fold);
  assert.equal(d.said.name, 'connecting');
});

test('Stop is asked once, asked again after a drop, and the end says who and which tools had run', () => {
  const d = started().live().entries(words(0, 2)).do({ type: 'stop' }).do({ type: 'stop_sent' });
  assert.equal(d.said.sentence, 'Live · stopping');
  d.close(1006);
  assert.equal(d.state.stop, 'wanted');
  d.after(250).do({ type: 'due' }).live().do({ type: 'stop_sent' }).frame({ type: 'cancel_accepted' });
  const result = (offset, more) => chunk(offset, { type: 'tool_result', id: `r${offset}`, toolCallId: `c${offset}`, result: 1, isError: false, ...more });
  d.entries(result(2), result(3, { isError: true, result: { code: 'rejected' } }), result(4), notice(5, { type: 'cancel_requested', actor: ana }), chunk(6, { type: 'done', reason: 'cancel' }));
  assert.equal(d.said.name, 'cancelled');
  assert.equal(d.said.sentence, 'Stopped by you at token 2. 2 tools had already run');
});

test('an agent that failed is an error that names it; one that retries is retrying', () => {
  const d = started().live().entries(text(0, 'x'), chunk(1, { type: 'error', error: { code: 'overloaded', message: 'busy' }, recoverable: true }));
  assert.equal(d.said.name, 'retrying');
  d.entries(chunk(2, { type: 'error', error: { code: 'gone', message: 'away' }, recoverable: false }), chunk(3, { type: 'done', reason: 'error' }));
  assert.equal(d.said.sentence, 'The agent ended with an error at token 1: gone: away');
});

test('the network coming back asks at once; a settled log never asks again', () => {
  const d = started().close(1006).do({ type: 'wake' });
  assert.equal(d.said.sentence, 'Connecting, attempt 1 of 4');
  const ended = started().live().entries(text(0, 'x'), chunk(1, { type: 'done', reason: 'stop' })).close(1000);
  assert.equal(ended.state.link.phase, 'off');
  assert.equal(ended.said.name, 'done');
});

test('a link that was never started stays off whatever happens', () => {
  for (const type of ['due', 'retry_now', 'continue', 'wake', 'reopen']) assert.equal(reduceLink(linkOff(), { type, at: 1 }).phase, 'off');
});

test('the log ended but an action is still open: the end is said, and what is open', () => {
  const d = started().live().entries(notice(0, { type: 'action', actionId: 'A', state: 'pending', version: 1 }), chunk(1, { type: 'done', reason: 'tool_use' }));
  assert.equal(d.said.sentence, 'Finished: tool_use · 0 tokens · 1 action still open');
  assert.equal(settled(d.state), false);
});

test('a result names the tool of its call', () => {
  const { fold } = applyEntries(emptyFold(), [chunk(0, { type: 'tool_call', id: 'c', name: 'pay', arguments: '{}', index: 0 }), chunk(1, { type: 'tool_result', id: 'r', toolCallId: 'c', result: 1, isError: false })]);
  assert.equal(fold.items[1].tool, 'pay');
});
