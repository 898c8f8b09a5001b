// @ts-check
// One approval request as a card, wherever it stands: in a run, on its own page, opened in the inbox. Knows how to show
// an action and how to be pressed; what a press does is in decision.js.

import { el, serverNow, setText, span } from '../streams/dom.js';
import { differences, NotJson, parseExact, printExact } from '../streams/exactjson.js';
import { shown } from '../streams/paint.js';
import { visible, warnings } from '../streams/safetext.js';
import { showArguments } from './args.js';
import { refusal } from './guards.js';
import { ago, LADDER, lastDecision } from './verdict.js';

/** @typedef {import('../streams/protocol.js').Action} Action */
/** @typedef {import('./verdict.js').Click} Click */
/** @typedef {import('./decision.js').Wish} Wish */
/** @typedef {{decide: (actionId: string, wish: Wish) => void, mayDecide: boolean, user: string, editable?: boolean, link?: boolean}} CardOptions */

/** @type {Record<string, string>} */
export const STATE_WORDS = {
  pending: 'Waiting for a decision', approved: 'Approved, not started', executing: 'Running', done: 'Done', failed: 'Failed',
  rejected: 'Rejected', expired: 'Expired', cancelled: 'Cancelled', unknown: 'Needs a look: nobody knows whether it ran',
};
/** @type {Record<string, string>} */
const EFFECT_WORDS = {
  at_most_once: 'Can’t be repeated safely: it runs at most once', idempotent: 'Safe to repeat: the same key has the same effect', transactional: 'Undone as a whole if it fails',
};
/** @type {Record<string, string>} */
const STEP_WORDS = { kept: 'kept here', sent: 'sent', recorded: 'recorded', executing: 'executing', done: 'done' };

let made = 0;

export class Card {
  /** @param {string} actionId @param {CardOptions} options */
  constructor(actionId, options) {
    made += 1;
    this.id = `card${made}`;
    this.actionId = actionId;
    this.options = options;
    /** @type {Action | null} */
    this.action = null;
    /** @type {Click | null} */
    this.click = null;
    this.live = false;
    this.shownAt = Infinity;
    /** @type {import('./args.js').Shown | null} */
    this.args = null;
    this.argsOf = '';
    this.argsDigest = '';
    this.risk = el('span', { class: 'badge risk' });
    this.tool = el('code', { class: 'tool', id: `${this.id}-tool` });
    this.state = el('span', { class: 'badge state' });
    this.left = el('span', { class: 'left note' });
    this.warn = el('div');
    this.agentSays = el('div');
    this.facts = el('dl', { class: 'facts' });
    this.argsBox = el('div');
    this.whatWord = el('span', {}, 'What will run');
    this.what = el('details', { class: 'fold what' }, el('summary', {}, this.whatWord), this.argsBox, this.facts);
    this.outcome = el('div', { class: 'outcome' });
    this.ladder = el('ol', { class: 'ladder', 'aria-label': 'What became of your click', hidden: true });
    this.message = el('p', { class: 'message', role: 'status' });
    this.approve = this.button('Approve', 'approve primary', (event) => this.press('approve', event));
    this.reject = this.button('Reject', 'reject', (event) => this.askReason(event));
    this.edit = this.button('Approve with edits…', 'edit', () => this.openEditor());
    this.reason = el('input', { type: 'text', id: `${this.id}-reason`, maxlength: 2000, autocomplete: 'off' });
    this.rejectNow = this.button('Reject it', 'reject-now danger', (event) => this.press('reject', event));
    this.back = this.button('Back', 'back', () => this.closePanels());
    this.reasonPanel = el('div', { class: 'panel', hidden: true }, el('label', { for: `${this.id}-reason` }, 'Reason, told to the agent (optional)'), this.reason, el('div', { class: 'buttons' }, this.rejectNow, this.back));
    this.editor = el('textarea', { id: `${this.id}-editor`, rows: 10, spellcheck: 'false', autocomplete: 'off', dir: 'ltr' });
    this.editNote = el('p', { class: 'note', role: 'status' });
    this.approveEdited = this.button('Approve these arguments', 'approve-edited primary', (event) => this.press('approve', event, true));
    this.backFromEdit = this.button('Back', 'back', () => this.closePanels());
    this.editPanel = el('div', { class: 'panel', hidden: true }, el('label', { for: `${this.id}-editor` }, 'Exact arguments (JSON). The tool’s name can’t be changed.'), this.editor, this.editNote, el('div', { class: 'buttons' }, this.approveEdited, this.backFromEdit));
    this.buttons = el('div', { class: 'buttons main' }, this.approve, this.reject, options.editable ? this.edit : null);
    this.node = el(
      'article', { class: 'card', 'aria-labelledby': `${this.id}-tool`, 'data-action': actionId },
      el('header', {}, this.risk, this.tool, this.state, this.left),
      this.warn, this.agentSays, this.what, this.outcome, this.buttons, this.reasonPanel, this.editPanel, this.ladder, this.message,
    );
    this.buttons.addEventListener('focusout', () => setTimeout(() => this.refreshButtons(), 0));
    this.what.addEventListener('toggle', () => this.refreshButtons());
    this.editor.addEventListener('input', () => this.checkEdit());
    this.reason.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.closePanels();
    });
    this.node.hidden = true;
  }

  /** @param {string} label @param {string} kind @param {(event: MouseEvent) => void} pressed */
  button(label, kind, pressed) {
    const button = el('button', { type: 'button', class: kind }, label);
    button.addEventListener('click', pressed);
    return button;
  }

  /** May this card be decided here and now, by this person? */
  get open() {
    const settled = this.click !== null && this.click.step !== 'refused';
    return this.options.mayDecide && this.action?.state === 'pending' && !settled;
  }

  /** @param {Action} action @param {boolean} live the buttons say what is true now */
  update(action, live) {
    const was = this.action;
    const wasOpen = this.open && this.live;
    this.action = action;
    this.live = live;
    if (!wasOpen && this.open && live) this.shownAt = performance.now();
    if (action === was) {
      this.refreshButtons();
      return;
    }
    this.node.hidden = false;
    // What waits is shown open; what was settled before anyone looked, folded. It never folds under a reader's eyes.
    if (was === null) this.what.open = action.state === 'pending' || this.options.editable === true;
    setText(this.whatWord, action.state === 'pending' ? 'What will run' : ['approved', 'executing'].includes(action.state) ? 'What was approved' : 'What was asked');
    this.node.dataset['state'] = action.state;
    this.node.dataset['risk'] = action.risk ?? 'unknown';
    setText(this.risk, `${action.risk ?? 'unknown'} risk`);
    setText(this.tool, visible(action.tool ?? ''));
    setText(this.state, STATE_WORDS[action.state] ?? action.state);
    this.warn.replaceChildren(...warnings(action.tool ?? '').map((words) => el('p', { class: 'warn' }, `Tool name. ${words}`)));
    if (action.summary && action.summary !== was?.summary) {
      const said = warnings(action.summary).map((words) => el('p', { class: 'warn' }, words));
      this.agentSays.replaceChildren(el('figure', { class: 'agent-says' }, el('figcaption', {}, 'The agent’s own words'), el('blockquote', { dir: 'auto' }, visible(action.summary, { lines: true })), ...said));
    }
    this.paintArguments(action);
    this.paintFacts(action);
    this.paintOutcome(action);
    this.refreshButtons();
    this.tick();
  }

  /** @param {Action} action */
  paintArguments(action) {
    if (action.argumentsText === undefined) return;
    this.argsDigest = action.digest ?? '';
    if (action.argumentsText === this.argsOf) return;
    if (this.argsOf !== '' && this.open) this.message.textContent = 'The arguments changed since you looked. Look again.';
    if (this.argsOf !== '') this.shownAt = performance.now();
    this.argsOf = action.argumentsText;
    this.args = showArguments(action.argumentsText, () => this.refreshButtons());
    /** @type {Node[]} */
    const parts = [this.args.node];
    if (action.edited && action.originalArgumentsText !== undefined) parts.push(...this.changes(action.originalArgumentsText, action.argumentsText));
    this.argsBox.replaceChildren(...parts);
  }

  /** @param {string} before @param {string} after */
  changes(before, after) {
    const rows = differences(before, after).map(({ path, before: old, after: fresh }) => el('tr', {}, el('th', { scope: 'row' }, visible(path)), el('td', {}, old === null ? '–' : el('del', {}, visible(old))), el('td', {}, fresh === null ? '–' : el('ins', {}, visible(fresh)))));
    return [el('h2', { class: 'sub' }, 'What the person changed'), el('table', { class: 'diff' }, el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'Field'), el('th', { scope: 'col' }, 'Proposed'), el('th', { scope: 'col' }, 'Approved'))), el('tbody', {}, ...rows))];
  }

  /** @param {Action} action */
  paintFacts(action) {
    /** @type {Array<[string, string | Node]>} */
    const facts = [];
    if (action.requestedBy) facts.push(['Asked by', visible(action.requestedBy.name)]);
    if (action.policy) facts.push(['Why it asks', `${visible(action.policy.rule || 'no rule names this tool')} (${visible(action.policy.name || 'no policy')}${action.policy.version ? ` v${action.policy.version}` : ''})`]);
    if (action.effects) facts.push(['Can it be undone', EFFECT_WORDS[action.effects] ?? action.effects]);
    if ((action.approvalsRequired ?? 1) > 1) facts.push(['Approvals', `${(action.decisions ?? []).filter((one) => one.decision === 'approve').length} of ${action.approvalsRequired}`]);
    if (action.previousActionId) facts.push(['Asked before', el('a', { href: `/approvals/${encodeURIComponent(action.previousActionId)}/` }, 'the earlier request')]);
    if (this.options.link) facts.push(['Page', el('a', { href: `/approvals/${encodeURIComponent(action.actionId)}/` }, 'open the whole request')]);
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
  }

  /** @param {Action} action */
  paintOutcome(action) {
    /** @type {Node[]} */
    const parts = (action.decisions ?? (action.decision ? [action.decision] : [])).map((one) => {
      const did = one.decision === 'approve' ? 'Approved' : one.decision === 'reject' ? 'Rejected' : visible(one.decision);
      const line = el('p', { class: 'who' }, `${did} by ${visible(one.actor.name)} `, el('time', { datetime: one.at, title: one.at }, ago(one.at, serverNow())));
      if (one.reason) line.append(': ', el('q', { dir: 'auto' }, visible(one.reason)));
      return line;
    });
    if (action.cancelRequested && action.state === 'executing') parts.push(el('p', { class: 'who' }, 'A cancel was asked; it is not called cancelled until the executor says nothing happened.'));
    if (action.result !== undefined && ['done', 'failed', 'unknown'].includes(action.state)) {
      parts.push(el('h2', { class: 'sub' }, action.state === 'done' ? 'What your approval did' : 'What is known'), el('pre', { tabindex: '0' }, visible(shown(action.result), { lines: true })));
    }
    this.outcome.replaceChildren(...parts);
  }

  /** @param {Click | null} click */
  follow(click) {
    const wasOpen = this.open;
    this.click = click;
    if (wasOpen && !this.open) this.closePanels();
    if (!wasOpen && this.open) this.shownAt = performance.now();
    this.ladder.hidden = click === null || click.step === 'refused';
    if (click !== null) {
      const at = LADDER.indexOf(/** @type {(typeof LADDER)[number]} */ (click.step === 'signed_out' ? 'kept' : click.step));
      const steps = LADDER.map((step, index) => {
        const words = step === 'sent' && click.tries > 1 ? `sent, try ${click.tries}` : STEP_WORDS[step] ?? step;
        return el('li', { class: index < at ? 'past' : index === at ? 'now' : 'next', ...(index === at ? { 'aria-current': 'step' } : {}) }, words);
      });
      const rungs = click.decision === 'reject' ? steps.slice(0, 3) : steps;
      this.ladder.replaceChildren(...rungs);
      this.ladder.title = `Key ${click.key}`;
      this.message.dataset['tone'] = click.tone;
      setText(this.message, click.message);
    }
    this.refreshButtons();
  }

  /** Why Approve is off; null when it is on. @returns {string | null} */
  offReason() {
    if (!this.live) return 'Catching up with the server. The buttons come back when what you see is true.';
    if (!this.args || this.argsDigest !== this.action?.digest) return 'The arguments are still being fetched.';
    if (!this.what.open) return 'Open what will run first.';
    if (!this.args.complete()) return 'Open what is folded first: not all of it has been shown.';
    return null;
  }

  refreshButtons() {
    const open = this.open;
    const off = this.offReason();
    // Never take the focused button away from under a person: it turns off in words and colour, and stays.
    this.buttons.hidden = !open && !this.buttons.contains(document.activeElement);
    for (const button of [this.approve, this.edit, this.approveEdited]) button.setAttribute('aria-disabled', String(!open || off !== null));
    for (const button of [this.reject, this.rejectNow]) button.setAttribute('aria-disabled', String(!open || !this.live));
    this.node.classList.toggle('live', open && this.live);
  }

  /** @param {MouseEvent | KeyboardEvent} event */
  askReason(event) {
    const why = !this.open ? null : !this.live ? this.offReason() : refusal({ shownAt: this.shownAt, risk: this.action?.risk, approving: false, event });
    if (why) return this.say(why);
    if (!this.open) return;
    this.editPanel.hidden = true;
    this.reasonPanel.hidden = false;
    this.reason.focus();
  }

  openEditor() {
    if (!this.open || !this.action?.argumentsText) return;
    const why = this.offReason();
    if (why) return this.say(why);
    this.reasonPanel.hidden = true;
    this.editPanel.hidden = false;
    this.editor.value = printExact(parseExact(this.action.argumentsText));
    this.checkEdit();
    this.editor.focus();
  }

  closePanels() {
    const inside = this.reasonPanel.contains(document.activeElement) || this.editPanel.contains(document.activeElement);
    this.reasonPanel.hidden = true;
    this.editPanel.hidden = true;
    if (inside && !this.buttons.hidden) this.approve.focus();
  }

  /** @returns {string | null} what is wrong with the edit */
  checkEdit() {
    let wrong = null;
    try {
      const node = parseExact(this.editor.value);
      if (node.kind !== 'object') wrong = 'The arguments must be an object in { }.';
      else {
        const changed = differences(this.action?.argumentsText ?? '{}', this.editor.value).length;
        setText(this.editNote, changed === 0 ? 'Nothing is changed yet.' : `${changed} ${changed === 1 ? 'field' : 'fields'} changed.`);
      }
    } catch (fault) {
      if (!(fault instanceof NotJson)) throw fault;
      wrong = `Not JSON: ${fault.message}.`;
    }
    if (wrong) setText(this.editNote, wrong);
    this.editor.setAttribute('aria-invalid', String(wrong !== null));
    return wrong;
  }

  /** @param {string} words */
  say(words) {
    this.message.dataset['tone'] = 'quiet';
    setText(this.message, words);
  }

  /**
   * A person pressed. Everything that may keep the press from counting is asked here, whatever the way it came.
   * @param {'approve' | 'reject'} decision @param {MouseEvent | KeyboardEvent} event @param {boolean} [edited]
   */
  press(decision, event, edited = false) {
    const action = this.action;
    if (!action) return;
    if (this.click !== null && this.click.step !== 'refused') {
      // A second press: the kept click answers it, and no second key is made.
      this.options.decide(action.actionId, { decision, digest: action.digest ?? '' });
      return;
    }
    if (!this.open) return;
    const off = decision === 'approve' ? this.offReason() : this.live ? null : this.offReason();
    const why = off ?? refusal({ shownAt: this.shownAt, risk: action.risk, approving: decision === 'approve', event });
    if (why) return this.say(why);
    /** @type {Wish} */
    const wish = { decision, digest: action.digest ?? '' };
    if (decision === 'reject' && this.reason.value.trim() !== '') wish.reason = this.reason.value.trim();
    if (edited) {
      const wrong = this.checkEdit();
      if (wrong) return this.say(wrong);
      if (differences(action.argumentsText ?? '{}', this.editor.value).length > 0) wish.argumentsText = this.editor.value;
    }
    this.options.decide(action.actionId, wish);
  }

  /** Time passes. */
  tick() {
    const action = this.action;
    if (!action) return;
    const until = action.state === 'pending' ? action.expiresAt : action.state === 'approved' ? action.approvedUntil : undefined;
    const left = until ? Date.parse(until) - serverNow() : NaN;
    setText(this.left, Number.isNaN(left) ? '' : left <= 0 ? 'time is up' : action.state === 'pending' ? `expires in ${span(left)}` : `must start within ${span(left)}`);
    this.left.classList.toggle('urgent', left < 60000);
    for (const time of this.outcome.querySelectorAll('time')) setText(time, ago(time.dateTime, serverNow()));
  }

  /** Who settled it, in a line. */
  settledLine() {
    const last = lastDecision(this.action ?? undefined);
    return last ? `${last.decision} by ${last.actor.name}` : '';
  }
}
