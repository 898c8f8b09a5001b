import assert from 'node:assert/strict';
import { test } from 'node:test';
import { parseFrame } from '../../streams/static/streams/protocol.js';
import { differences, NotJson, parseExact, printExact } from '../../streams/static/streams/exactjson.js';

const read = (frame) => parseFrame(JSON.stringify(frame));

test('every kind of frame in the contract is read', () => {
  const action = { actionId: 'a', state: 'pending', version: 1 };
  const frames = [
    { type: 'welcome', epoch: 'e', generation: { id: 'g', state: 'open' }, actions: [action], firstOffset: 0, nextOffset: 4, heartbeatSeconds: 15 },
    { type: 'reset', reason: 'ahead', epoch: 'f', firstOffset: 2 },
    { type: 'entries', entries: [{ offset: 0, attempt: 1, at: 'x', chunk: { type: 'text', content: 'é' } }] },
    { type: 'caught_up', nextOffset: 4 },
    { type: 'heartbeat', nextOffset: 4 },
    { type: 'decided', requestId: 'r', replayed: true, decision: { decision: 'approve', actor: { kind: 'person', id: '1', name: 'ana' }, at: 'x' }, action },
    { type: 'cancel_accepted' },
    { type: 'error', code: 'already_decided', detail: 'x', action },
    { type: 'action', action },
  ];
  for (const frame of frames) {
    const { frame: got, problem } = read(frame);
    assert.equal(problem, null, frame.type);
    assert.equal(got?.type, frame.type);
  }
});

test('a frame that is wrong anywhere says where and gives nothing', () => {
  const wrong = [
    '{', '[]', 'null', '{"type":"entries","entries":{}}',
    '{"type":"entries","entries":[{"offset":-1,"chunk":{"type":"text","content":"x"}}]}',
    '{"type":"entries","entries":[{"offset":1.5,"chunk":{"type":"text","content":"x"}}]}',
    '{"type":"entries","entries":[{"offset":0,"chunk":{"type":"text","content":7}}]}',
    '{"type":"entries","entries":[{"offset":0}]}',
    '{"type":"welcome","epoch":3}',
    '{"type":"decided","decision":{},"action":{"actionId":"a","state":"done"}}',
  ];
  for (const text of wrong) {
    const { frame, problem } = parseFrame(text);
    assert.equal(frame, null, text);
    assert.notEqual(problem, null, text);
  }
  assert.notEqual(parseFrame(new ArrayBuffer(2)).problem, null);
});

test('a kind of frame from the future is skipped without a word; a chunk from the future is kept in its place', () => {
  assert.deepEqual(read({ type: 'weather' }), { frame: null, problem: null });
  const { frame } = read({ type: 'entries', entries: [{ offset: 0, attempt: 1, at: '', chunk: { type: 'image', url: 'x' } }] });
  assert.equal(frame.entries[0].chunk.type, 'unknown');
});

test('exact JSON keeps every digit a browser number would change', () => {
  const text = '{"a":9007199254740993,"b":[0.1000000000000000055,1e+21],"c":{}}';
  assert.match(printExact(parseExact(text)), /9007199254740993/);
  assert.match(printExact(parseExact(text)), /0\.1000000000000000055/);
  assert.deepEqual(differences('{"a":9007199254740993}', '{"a":9007199254740992}'), [{ path: 'a', before: '9007199254740993', after: '9007199254740992' }]);
});

test('exact JSON refuses what the server would refuse, and says where', () => {
  for (const text of ['', '{"a":1,"a":2}', '{"a":NaN}', '[1,]', '{"a":01}', '"\u0001"', '{"a":1} x', `${'['.repeat(70)}${']'.repeat(70)}`]) {
    assert.throws(() => parseExact(text), NotJson, text);
  }
  assert.throws(() => parseExact('{\n "a": x}'), /line 2, column 7/);
});
