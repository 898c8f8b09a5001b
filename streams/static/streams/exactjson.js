// @ts-check
// JSON as it was written: a reader that keeps every number's digits, for showing and comparing arguments.
// (JSON.parse would turn 9007199254740993 into another number before a person saw it.)

/** @typedef {{kind: 'object', entries: Array<[string, Node]>} | {kind: 'array', items: Node[]} | {kind: 'string', value: string} | {kind: 'word', text: string}} Node */

const SPACE = /[\x20\t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const STRING = /"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const WORD = /true|false|null/y;
const DEPTH = 64;

export class NotJson extends Error {}

/** @param {string} source @returns {Node} */
export function parseExact(source) {
  let at = 0;
  /** @param {RegExp} pattern @returns {string | null} */
  const take = (pattern) => {
    pattern.lastIndex = at;
    const match = pattern.exec(source);
    if (!match) return null;
    at = pattern.lastIndex;
    return match[0];
  };
  /** @param {string} expected @returns {never} */
  const fail = (expected) => {
    const line = source.slice(0, at).split('\n');
    throw new NotJson(`line ${line.length}, column ${(line.at(-1)?.length ?? 0) + 1}: ${expected} expected`);
  };
  /** @param {number} depth @returns {Node} */
  const value = (depth) => {
    if (depth > DEPTH) fail('less nesting');
    take(SPACE);
    const first = source[at];
    if (first === '{') {
      at += 1;
      /** @type {Array<[string, Node]>} */
      const entries = [];
      const keys = new Set();
      take(SPACE);
      if (source[at] === '}') at += 1;
      else {
        for (;;) {
          take(SPACE);
          const key = take(STRING) ?? fail('a key in double quotes');
          const name = /** @type {string} */ (JSON.parse(key));
          if (keys.has(name)) fail(`each key once (${key} stands twice), something else`);
          keys.add(name);
          take(SPACE);
          if (source[at] !== ':') fail('":"');
          at += 1;
          entries.push([name, value(depth + 1)]);
          take(SPACE);
          if (source[at] === ',') at += 1;
          else if (source[at] === '}') {
            at += 1;
            break;
          } else fail('"," or "}"');
        }
      }
      return { kind: 'object', entries };
    }
    if (first === '[') {
      at += 1;
      /** @type {Node[]} */
      const items = [];
      take(SPACE);
      if (source[at] === ']') at += 1;
      else {
        for (;;) {
          items.push(value(depth + 1));
          take(SPACE);
          if (source[at] === ',') at += 1;
          else if (source[at] === ']') {
            at += 1;
            break;
          } else fail('"," or "]"');
        }
      }
      return { kind: 'array', items };
    }
    if (first === '"') {
      const text = take(STRING) ?? fail('a whole string');
      return { kind: 'string', value: /** @type {string} */ (JSON.parse(text)) };
    }
    return { kind: 'word', text: take(WORD) ?? take(NUMBER) ?? fail('a value') };
  };
  const node = value(1);
  take(SPACE);
  if (at !== source.length) fail('the end');
  return node;
}

/** The same JSON in lines, two spaces a level; numbers untouched. @param {Node} node @param {string} [indent] @returns {string} */
export function printExact(node, indent = '') {
  const deeper = `${indent}  `;
  switch (node.kind) {
    case 'word':
      return node.text;
    case 'string':
      return JSON.stringify(node.value);
    case 'array':
      return node.items.length === 0 ? '[]' : `[\n${node.items.map((item) => deeper + printExact(item, deeper)).join(',\n')}\n${indent}]`;
    case 'object':
      return node.entries.length === 0
        ? '{}'
        : `{\n${node.entries.map(([key, item]) => `${deeper}${JSON.stringify(key)}: ${printExact(item, deeper)}`).join(',\n')}\n${indent}}`;
  }
}

/** @typedef {{path: string, before: string | null, after: string | null}} Difference */

/** @param {Node} node @param {string} path @param {Map<string, string>} into */
function leaves(node, path, into) {
  if (node.kind === 'object' && node.entries.length > 0) for (const [key, item] of node.entries) leaves(item, path === '' ? key : `${path} › ${key}`, into);
  else if (node.kind === 'array' && node.items.length > 0) node.items.forEach((item, index) => leaves(item, `${path}[${index}]`, into));
  else into.set(path, printExact(node));
}

/** Every leaf by its path. @param {Node} node @returns {Map<string, string>} */
export function leavesOf(node) {
  const found = new Map();
  leaves(node, '', found);
  return found;
}

/** @param {string} before @param {string} after JSON texts @returns {Difference[]} */
export function differences(before, after) {
  const old = leavesOf(parseExact(before));
  const fresh = leavesOf(parseExact(after));
  const paths = new Set([...old.keys(), ...fresh.keys()]);
  return [...paths].flatMap((path) => {
    const a = old.get(path) ?? null;
    const b = fresh.get(path) ?? null;
    return a === b ? [] : [{ path, before: a, after: b }];
  });
}
