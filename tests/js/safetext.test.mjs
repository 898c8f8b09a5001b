import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { hasHidden, mixedWords, visible, warnings } from '../../streams/static/streams/safetext.js';

const cases = JSON.parse(readFileSync(new URL('./safetext.json', import.meta.url), 'utf8'));
for (const one of cases) {
  test(`safe text: ${one.why}`, () => {
    assert.equal(visible(one.text), one.visible);
    assert.equal(hasHidden(one.text), one.hidden);
    assert.deepEqual(mixedWords(one.text), one.mixed);
  });
}

test('lines keep their newlines and tabs, and nothing else unseen', () => {
  assert.equal(visible('a\n\tb\u0000\r\nc', { lines: true }), 'a\n\tb‹U+0000›\nc');
  assert.equal(visible('a\rb', { lines: true }), 'a‹U+000D›b');
});

test('prose keeps the joiners inside emoji; arguments never do', () => {
  const family = '👨‍👩‍👧 ❤️';
  assert.equal(visible(family, { emoji: true }), family);
  assert.equal(visible('a\u200Db', { emoji: true }), 'a‹U+200D›b');
  assert.match(visible(family), /‹U\+200D›/);
});

test('a separate accent is a warning, since it looks like another text', () => {
  assert.deepEqual(warnings('café'.normalize('NFC')), []);
  assert.equal(warnings('café'.normalize('NFD')).length, 1);
});

test('a mixed word names the letter that is not what it looks like', () => {
  assert.match(warnings('p\u0430ypal.com')[0], /\u0430 is U\+0430/);
});
