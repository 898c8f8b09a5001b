import assert from 'node:assert/strict';
import { test } from 'node:test';
import * as v from '../../approvals/static/approvals/verdict.js';

const NOW = Date.parse('2026-11-30T12:00:12Z');
const click = (more = {}) => ({
  ...v.newClick({ user: '7', actionId: 'act', key: 'click-1', decision: 'approve', digest: 'sha256:d', at: NOW, ...more }),
});
const sent = (more = {}) => v.sending(click(more));
const bruna = { decision: 'reject', actor: { kind: 'person', id: '2', name: 'bruna' }, at: '2026-11-30T12:00:00Z' };
const action = (state, more = {}) => ({ actionId: 'act', state, version: 3, ...more });
const ok = (more = {}) => ({ status: 200, body: { replayed: false, decision: { decision: 'approve' }, action: action('approved'), ...more } });

test('a key is visible ASCII of a legal length and comes from the random source', () => {
  let asked = 0;
  const key = v.newKey((bytes) => {
    asked = bytes.length;
    return bytes.fill(171);
  });
  assert.equal(asked, 20);
  assert.match(key, /^[\x21-\x7e]{8,255}$/);
  assert.match(key, /(ab){20}$/);
});

test('the kept row is bound to the person', () => {
  assert.notEqual(v.storeKey('7', 'act'), v.storeKey('8', 'act'));
});

test('a kept row survives being written and read, and a broken one is nothing', () => {
  assert.deepEqual(v.readClick(JSON.stringify(click())), click());
  for (const text of [null, '', '{', '{"v":2}', '{"v":1}', 'null']) assert.equal(v.readClick(text), null);
});

test('edited arguments are sent as the text that was typed', () => {
  const body = v.bodyOf(click({ argumentsText: '{"amount":9007199254740993}' }));
  assert.ok(body.endsWith(',"arguments":{"amount":9007199254740993}}'));
  assert.equal(JSON.parse(body).digest, 'sha256:d');
  assert.equal(JSON.parse(body).idempotencyKey, 'click-1');
});

test('no answer, 5xx, 429 and in_flight are sent again with the same key', () => {
  for (const outcome of [{ status: 0, why: 'x' }, { status: 503, body: null, retryAfterMs: 1000 }, { status: 500, body: null }, { status: 429, body: null }, { status: 409, body: { code: 'in_flight' }, retryAfterMs: 1000 }, { status: 403, body: null }]) {
    const { click: next, again } = v.judge(sent(), outcome, NOW);
    assert.equal(again, true, JSON.stringify(outcome));
    assert.equal(next.key, 'click-1');
    assert.equal(v.unsettled(next), true);
  }
  assert.equal(v.judge(sent(), { status: 503, body: null, retryAfterMs: 1000 }, NOW).waitMs, 1000);
});

test('409, 422, 403 and 404 with a code are final, and leave room for a new click', () => {
  for (const [status, code] of [[409, 'expired'], [409, 'cancelled'], [409, 'digest_mismatch'], [409, 'already_decided'], [409, 'needs_more_approvals'], [422, 'idempotency_key_reused'], [422, 'arguments_invalid'], [403, 'not_allowed'], [403, 'self_approval'], [404, 'not_found'], [400, 'invalid']]) {
    const { click: next, again } = v.judge(sent(), { status, body: { code } }, NOW);
    assert.equal(again, false, code);
    assert.equal(next.step, 'refused', code);
    assert.equal(v.standsInTheWay(next), false, code);
  }
});

test('a replay and an own earlier decision say: already recorded, not repeated', () => {
  assert.equal(v.judge(sent(), ok({ replayed: true }), NOW).click.message, 'Already recorded, not repeated');
  assert.equal(v.judge(sent(), ok({ alreadyDecided: true }), NOW).click.message, 'Already recorded, not repeated');
  assert.equal(v.judge(sent(), ok(), NOW).click.message, 'Approval recorded');
});

test('a second click on a recorded one is told so, also when it wished the other thing', () => {
  const recorded = v.judge(sent(), ok(), NOW).click;
  assert.equal(v.standsInTheWay(recorded), true);
  assert.equal(v.notRepeated(recorded, 'approve').message, 'Already recorded, not repeated');
  assert.equal(v.notRepeated(recorded, 'reject').message, 'Already recorded: you approved it');
});

test('a lost race names who won and when', () => {
  const { click: next } = v.judge(sent(), { status: 409, body: { code: 'already_decided', action: action('rejected', { decisions: [bruna] }) } }, NOW);
  assert.equal(next.message, 'Already rejected by bruna 12 s ago: your approval was not applied');
});

test('changed arguments are said in words', () => {
  assert.match(v.judge(sent(), { status: 409, body: { code: 'digest_mismatch' } }, NOW).click.message, /the arguments changed since you looked/);
});

test('a session that ended keeps the click', () => {
  const { click: next, again } = v.judge(sent(), { status: 401, body: { code: 'not_signed_in' } }, NOW);
  assert.equal(again, false);
  assert.equal(v.unsettled(next), true);
});

test('the ladder climbs with the action and an unsent click does not follow', () => {
  const recorded = v.judge(sent(), ok(), NOW).click;
  const executing = v.follow(recorded, action('executing'));
  assert.equal(executing.step, 'executing');
  assert.equal(v.follow(executing, action('done')).step, 'done');
  assert.equal(v.follow(executing, action('failed')).tone, 'bad');
  assert.match(v.follow(executing, action('unknown')).message, /Nobody knows/);
  assert.equal(v.follow(sent(), action('done')).step, 'sent');
  assert.equal(v.follow(recorded, { ...action('done'), actionId: 'other' }).step, 'recorded');
});

test('tries grow apart, with chance, up to ten seconds', () => {
  assert.ok(v.retryMs(1, 1) <= 250);
  assert.ok(v.retryMs(30, 1) <= 10000);
  assert.ok(v.retryMs(5, 0) < v.retryMs(5, 1));
});
