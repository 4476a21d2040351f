// State and views. Alpine holds what is small; lists, timeline and charts have modules of their own, because
// Alpine's CSP build parses an expression anew at every evaluation.
import * as f from './fmt.js';
import { get, post, runPath, stream, takeToken } from './api.js';
import { CHARTS, chart, ownChart, xText } from './charts.js';
import { Timeline } from './timeline.js';
import { VTable } from './vtable.js';

const words = () => import('./words.js').then((m) => m.WORDS),
	drawer = () => import('./drawer.js');
let listed; // that the storage is known, and which actions there are
const { h, s, icon, int, count, span, ago, past, pct, when, full } = f;
const STATE = {
	running: 'Running',
	starting: 'Starting',
	waiting: 'Waiting for workers',
	done: 'Done',
	stopped: 'Stopped',
	failed: 'Failed',
	gone: 'No sign of life',
	open: 'Looking for a sign of life',
	unreadable: 'Unreadable',
};
const ALIVE = new Set(['running', 'waiting', 'starting']);
const where = (state) => (ALIVE.has(state) ? 'alive' : state === 'open' ? '' : 'ended'); // one that is only being looked at is in neither list
const URGENT = ['gone', 'failed', 'unreadable', 'waiting', 'open', 'running', 'starting', 'stopped', 'done'];
const EVENT_ICON = Object.fromEntries(
	Object.entries({
		'fault fault': 'worker frozen error nosave waiting feeder coordinator',
		'crash fault': 'crash failed',
		'damaged fault': 'damaged',
		'rewind rewind': 'rewind',
		'change accent': 'resize join',
		'start muted': 'start',
		'branch accent': 'fork',
		'done muted': 'done',
		'resume orphan': 'resume change',
		'coordinator orphan': 'reform',
	}).flatMap(([look, kinds]) => kinds.split(' ').map((k) => [k, look.split(' ')])),
);
export const PARTS = [
	['productive', 'Productive'],
	['data_wait', 'Waiting for data'],
	['saving', 'Saving'],
	['evaluating', 'Evaluating'],
	['reforming', 'Re-forming'],
	['starting', 'Starting'],
	['waiting', 'Waiting for workers'],
	['lost', 'Lost work'],
	['rewound', 'Rewound'],
	['down', 'Down'],
	['other', 'Not accounted for'],
];
// how many workers are wanted; empty while an attempt has claimed and not yet said so
const wanted = (r) => (r.world_wanted ? [...new Set(r.world_wanted)].join('–') : '');
const TOKEN = {
	'page.no_token': 'This address lacks its token',
	'page.wrong_token': 'The token of this address is wrong',
};
const css = (x) => (Math.max(0, Math.min(1, x || 0)) * 100).toFixed(3) + '%';
const raw = (x) => Alpine.raw(x);
const keep = (x) => Object.defineProperty(x, '__v_skip', { value: true }); // never reactive
// What a component does not declare lands in the outermost scope: declare everything.
// Listeners that end with a view: its destroy() calls off().
const listen = (view, map) => {
	for (const [k, fn] of Object.entries(map)) addEventListener(k, fn);
	view.off = () => {
		for (const [k, fn] of Object.entries(map)) removeEventListener(k, fn);
	};
};

document.addEventListener('alpine:init', () => {
	Alpine.magic('f', () => f);

	// ------------------------------------------------------------ frame
	Alpine.data('app', () => ({
		view: '',
		name: '',
		tab: 'overview',
		params: {},
		storage: '',
		runNames: [],
		actions: [],
		theme: 'auto',
		utc: false,
		tick: 0,
		offset: 0,
		conn: 'load',
		toast: '',
		toastTimer: 0,
		axis: 'time',
		keyList: Object.entries({
			'1 … 8': 'views of a run',
			r: 'all runs',
			'/': 'find',
			'↑ ↓ ↵': 'rows of a table, open one',
			'[ ]': 'newer, older point',
			Esc: 'close',
			'← → + − 0': 'marks and zoom of the focused timeline',
			t: 'light, dark, system',
			u: 'UTC or your zone',
			'?': 'this page',
		}).map(([key, what]) => ({ key, what })),
		wordList: [],
		init() {
			try {
				this.theme = localStorage.getItem('theme') || 'auto';
				this.utc = localStorage.getItem('utc') === '1';
			} catch {
				/* closed */
			}
			f.zone.utc = this.utc;
			matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.paintTheme());
			addEventListener('hashchange', () => this.route());
			setInterval(() => {
				this.tick++;
			}, 1000);
			tooltips();
			listed = get('runs')
				.then((d) => {
					this.storage = d.storage;
					this.runNames = d.runs.map((r) => r.name);
					this.actions = d.actions;
					this.sync(d.now);
				})
				.catch(() => {});
			this.route();
		},
		css,
		sync(now) {
			this.offset = now - Date.now() / 1000;
		},
		now() {
			this.tick;
			return Date.now() / 1000 + this.offset;
		},
		route() {
			if (takeToken()) {
				location.reload();
				return;
			} // another server's link in an open tab
			const [path, query] = (location.hash.slice(1) || '/').split('?'),
				parts = path.split('/').filter(Boolean);
			const name = parts[0] === 'run' ? decodeURIComponent(parts[1] || '') : '';
			this.params = Object.fromEntries(new URLSearchParams(query || ''));
			this.axis =
				this.params.axis === 'tokens'
					? 'tokens'
					: this.params.axis === 'time'
						? 'time'
						: parts[2] === 'charts'
							? 'tokens'
							: 'time';
			if (name !== this.name || (name ? 'run' : 'runs') !== this.view) {
				this.view = '';
				this.name = name;
				this.tab = parts[2] || 'overview';
				this.$nextTick(() => {
					this.view = name ? 'run' : 'runs';
				});
			} else if ((parts[2] || 'overview') !== this.tab) {
				this.tab = '';
				this.$nextTick(() => {
					this.tab = parts[2] || 'overview';
				});
			}
			document.title = name ? name + ' · orchestrator' : 'orchestrator';
			if (!name) this.conn = 'idle';
		},
		link(tab, key, value) {
			const q = key ? '?' + new URLSearchParams({ [key]: value }) : '';
			return '#/run/' + encodeURIComponent(this.name) + (tab === 'overview' ? '' : '/' + tab) + q;
		},
		open(name) {
			location.hash = '#/run/' + encodeURIComponent(name);
		},
		pickRun(el) {
			const names = this.runNames.includes(this.name) ? this.runNames : [this.name, ...this.runNames];
			el.replaceChildren(...names.map((n) => h('option', { value: n, selected: n === this.name }, n)));
			el.value = this.name;
		},
		param(values) {
			const p = { ...this.params, ...values };
			for (const k of Object.keys(p)) if (p[k] == null || p[k] === '') delete p[k];
			this.params = p;
			const q = new URLSearchParams(p);
			history.replaceState(
				null,
				'',
				location.pathname +
					location.search +
					'#/run/' +
					encodeURIComponent(this.name) +
					(this.tab === 'overview' ? '' : '/' + this.tab) +
					(q.size ? '?' + q : ''),
			);
		},
		connClass() {
			return { live: 'beat', lost: 'bad', shut: 'bad', load: 'warn', idle: 'idle', still: 'idle' }[this.conn];
		},
		connText() {
			return {
				live: 'live',
				lost: 'no connection, trying again',
				shut: 'not let in: the token',
				load: 'loading',
				idle: '',
				still: 'from storage',
			}[this.conn];
		},
		clockText() {
			return f.clock(this.now()) + (this.utc ? ' UTC' : '');
		},
		toggleZone() {
			this.utc = f.zone.utc = !this.utc;
			try {
				localStorage.setItem('utc', this.utc ? '1' : '');
			} catch {
				/* closed */
			}
			dispatchEvent(new Event('redraw'));
		},
		toggleTheme() {
			this.theme = { auto: 'light', light: 'dark', dark: 'auto' }[this.theme];
			try {
				localStorage.setItem('theme', this.theme);
			} catch {
				/* closed */
			}
			this.say('Theme: ' + (this.theme === 'auto' ? 'as the system' : this.theme));
			this.paintTheme();
		},
		paintTheme() {
			const dark =
				this.theme === 'dark' || (this.theme === 'auto' && matchMedia('(prefers-color-scheme: dark)').matches);
			document.documentElement.dataset.theme = dark ? 'dark' : 'light';
			dispatchEvent(new Event('redraw'));
		},
		async copy(text) {
			try {
				await navigator.clipboard.writeText(text);
				this.say('Copied');
			} catch {
				this.say('This browser does not allow it: select the text and copy it');
			}
		},
		say(text) {
			this.toast = text;
			clearTimeout(this.toastTimer);
			this.toastTimer = setTimeout(() => {
				this.toast = '';
			}, 2600);
		},
		skip() {
			document.getElementById('main').focus();
		},
		async help() {
			this.wordList = Object.entries(await words()).map(([id, [name, text]]) => ({ id, name, text }));
			this.$refs.help.showModal();
		},
		helpClose() {
			this.$refs.help.close();
		},
		keys(e) {
			if (e.ctrlKey || e.metaKey || e.altKey || /^(input|select|textarea)$/i.test(e.target.tagName)) {
				if (e.key === 'Escape') e.target.blur();
				return;
			}
			if (document.querySelector('dialog[open]')) return;
			if (e.key === '?') this.help();
			else if (e.key === 't') this.toggleTheme();
			else if (e.key === 'u') this.toggleZone();
			else if (e.key === 'r') location.hash = '#/';
			else if (e.key === '/') {
				const box = document.querySelector('[data-find]');
				if (box) {
					box.focus();
					e.preventDefault();
				}
			} else if (this.view === 'run' && /^[1-9]$/.test(e.key)) location.hash = this.link(TABS[e.key - 1][0]).slice(1);
			else dispatchEvent(new CustomEvent('runkey', { detail: e.key }));
		},
		levelClass(l) {
			return { ok: 'ok', warn: 'warn', bad: 'fault', idle: 'muted', none: 'faint' }[l];
		},
		stateWord(x) {
			return STATE[x];
		},
		whenText(t) {
			this.tick;
			return when(t, Date.now() / 1000 + this.offset);
		},
	}));

	// ------------------------------------------------------------ all runs
	Alpine.data('runsPage', () => ({
		rows: null,
		error: null,
		q: '',
		filter: 'all',
		timer: 0,
		init() {
			this.load();
			this.timer = setInterval(() => this.load(true), 10000);
		},
		destroy() {
			clearInterval(this.timer);
		},
		async load(quiet) {
			if (!quiet) {
				this.error = null;
			}
			try {
				const d = await get('runs');
				this.sync(d.now);
				this.storage = d.storage;
				this.rows = d.runs
					.map((r) => this.row(r, d.now))
					.sort((a, b) => URGENT.indexOf(a.state) - URGENT.indexOf(b.state) || b.t - a.t);
				this.error = null;
				this.conn = 'still';
			} catch (e) {
				const shut = e.status === 401;
				if (shut) clearInterval(this.timer);
				this.error = {
					title: shut ? TOKEN[e.code] || TOKEN['page.no_token'] : 'The runs cannot be read',
					text: e.message,
					more: [e.do, quiet && this.rows ? 'Below is what was last read.' : ''].filter(Boolean).join(' '),
				};
				this.conn = shut ? 'shut' : 'lost';
			}
		},
		row(r, now) {
			const bad = r.state === 'unreadable',
				p = r.progress,
				alive = ALIVE.has(r.state);
			const sign = bad ? null : r.last_sign;
			return {
				name: r.name,
				state: r.state,
				word: STATE[r.state],
				t: sign || r.created,
				gaps: !!r.missing_text,
				line: bad
					? r.reason
					: r.missing_text
						? r.missing_text
						: r.state === 'running'
							? 'attempt ' + r.attempt + (r.progress.eta_s ? ' · ' + span(r.progress.eta_s) + ' to go' : '')
							: r.reason,
				step: bad ? '–' : 'step ' + int(p.step),
				stepMore: bad || p.share == null ? '' : pct(p.share, p.share < 1 ? 1 : 0),
				workers: bad || !alive ? '–' : wanted(r) ? r.world_size + ' of ' + wanted(r) : 'being started',
				risk: bad || !r.risk ? '–' : r.risk.tokens ? count(r.risk.tokens) : 'nothing',
				riskMore: bad || !r.risk?.steps ? '' : span(r.risk.seconds) + ' of work',
				point: bad ? '–' : r.point ? 'step ' + int(r.point.step) : 'none yet',
				pointMore: !bad && r.point?.t != null ? past(r.point.t, now) + ' · ' + when(r.point.t, now) : '',
				sign: past(sign, now),
				signAbs: sign == null ? '' : when(sign, now),
			};
		},
		shown() {
			return this.rows.filter(
				(r) => (this.filter === 'all' || this.filter === where(r.state)) && r.name.includes(this.q.trim()),
			);
		},
		chips() {
			const n = (x) => this.rows.filter((r) => where(r.state) === x).length;
			return [
				{ id: 'all', label: 'All', n: this.rows.length },
				{ id: 'alive', label: 'Alive', n: n('alive') },
				{ id: 'ended', label: 'Not running', n: n('ended') },
			];
		},
		headline() {
			const bad = this.rows.filter(
				(r) => ['gone', 'failed', 'unreadable', 'waiting'].includes(r.state) || r.gaps,
			).length;
			return this.rows.length + (this.rows.length === 1 ? ' run' : ' runs') + (bad ? ', ' + bad + ' to look at' : '');
		},
	}));

	// ------------------------------------------------------------ one run
	const TABS = [
		['overview', 'Overview'],
		['points', 'Resume points'],
		['lineage', 'Lineage'],
		['charts', 'Charts'],
		['data', 'Data'],
		['goodput', 'Goodput'],
		['events', 'Events'],
		['plan', 'What if'],
		['cards', 'Tables'],
	];
	Alpine.data('runPage', () => ({
		run: null,
		failure: null,
		drawer: null,
		doing: null,
		typing: 0,
		unstream: null,
		off: null,
		opener: null,
		init() {
			this.reload();
			listen(this, { runkey: (e) => this.runKey(e.detail) });
			this.$watch('params.point', (v) => this.fromParams());
			this.$watch('params.event', (v) => this.fromParams());
		},
		destroy() {
			this.unstream?.();
			this.off();
		},
		get alive() {
			return !!this.run && ALIVE.has(this.run.state) && this.run.state !== 'starting';
		},
		async reload() {
			this.failure = null;
			this.conn = 'load';
			try {
				this.take(await this.get(''));
				this.conn = ALIVE.has(this.run.state) ? 'live' : 'still';
				this.fromParams();
				this.unstream ??= stream(
					runPath(this.name) + '/stream',
					(kind, d) => kind === 'summary' && this.take(d),
					(c) => {
						this.conn = c === 'live' && !ALIVE.has(this.run.state) ? 'still' : c;
					},
				);
			} catch (e) {
				this.conn = e.status === 401 ? 'shut' : e.status === 0 || e.status >= 500 ? 'lost' : 'still';
				this.failure = {
					title:
						{ 'run.unknown': 'There is no such run', unreachable: 'No answer', ...TOKEN }[e.code] ||
						(e.file
							? 'The journal of this run is damaged'
							: e.status === 503
								? 'The storage cannot be read'
								: 'This run cannot be shown'),
					text: e.message,
					more: e.do || '',
					missing: e.missing_text || '',
					points: e.points,
					uri: (this.storage ? this.storage + '/' : '') + this.name,
				};
			}
		},
		at(tab) {
			return this.run && !this.failure && this.tab === tab;
		},
		get(path, query) {
			return get(runPath(this.name) + path, query);
		},
		take(d) {
			this.sync(d.now);
			d.recent = d.recent.map((e) => ({
				...e,
				icon: (EVENT_ICON[e.kind] || ['routine'])[0],
				cls: (EVENT_ICON[e.kind] || [0, 'muted'])[1],
			}));
			this.run = d;
			dispatchEvent(new Event('summary'));
		},
		tabs() {
			const r = this.run;
			return TABS.map(([id, label]) => ({
				id,
				label,
				href: this.link(id),
				n: !r ? '' : id === 'points' ? int(r.points.total) : id === 'lineage' ? int(r.attempt) : '',
			}));
		},
		intoView(el) {
			el.scrollIntoView({ block: 'nearest', inline: 'nearest' });
		},
		sinceText() {
			const r = this.run;
			return (
				'· ' +
				(ALIVE.has(r.state)
					? 'since ' + this.whenText(r.since)
					: r.state === 'gone'
						? 'for ' + ago(this.now() - r.since)
						: ago(this.now() - r.since) + ' ago')
			);
		},
		// drawer; not by $refs, which a button that is gone by then cannot follow
		fromParams() {
			if (this.params.point) this.showPoint(this.params.point);
			else if (this.params.event) this.showEvent(this.params.event);
			else if (this.drawer) this.drawer = null;
		},
		async showPoint(name) {
			if (this.drawer?.id === name) return;
			try {
				const [d, { drawPoint }] = await Promise.all([
					this.get('/points/' + encodeURIComponent(name)),
					drawer(),
					listed,
				]);
				if (this.params.point !== name) return;
				const p = d.point,
					fresh = !this.drawer;
				if (fresh) this.opener = document.activeElement;
				this.drawer = {
					kind: 'point',
					id: name,
					title: 'Step ' + int(p.step),
					sub: name,
					icon: f.pointIcon(p),
					cls: p.state === 'damaged' ? 'fault' : p.state === 'orphan' ? 'muted' : 'ok',
				};
				this.$nextTick(() => {
					const el = document.querySelector('.drawer .inner');
					if (!el) return;
					el.replaceChildren(...drawPoint(d, this));
					if (fresh) {
						el.scrollTop = 0;
						document.getElementById('drh').focus({ preventScroll: true });
					}
				});
			} catch (e) {
				this.say(e.message);
			}
		},
		async showEvent(id) {
			let e, draw;
			try {
				[e, { drawEvent: draw }] = await Promise.all([this.get('/events/' + id), drawer()]);
			} catch (x) {
				return this.say(x.message);
			}
			const fresh = !this.drawer;
			if (fresh) this.opener = document.activeElement;
			this.drawer = {
				kind: 'event',
				id,
				title: e.kind,
				sub: id,
				icon: e.level,
				cls: e.level === 'fault' ? 'fault' : 'muted',
			};
			this.$nextTick(() => {
				const el = document.querySelector('.drawer .inner');
				if (!el) return;
				el.replaceChildren(...draw(e, this));
				if (fresh) document.getElementById('drh').focus({ preventScroll: true });
			});
		},
		closeDrawer() {
			this.drawer = null;
			this.param({ point: null, event: null });
			this.opener?.focus?.();
			dispatchEvent(new Event('selection'));
		},
		step(n) {
			dispatchEvent(new CustomEvent('step', { detail: n }));
		},
		runKey(k) {
			if (k === 'Escape' && this.drawer) this.closeDrawer();
			else if (k === '[' || k === ']') this.step(k === '[' ? -1 : 1);
		},
		// range shared by timeline and charts, kept in the address
		range() {
			const p = this.params;
			return p.from != null && p.to != null ? [Number(p.from), Number(p.to)] : null;
		},
		ranged() {
			return this.params.from != null;
		},
		setAxis(axis) {
			this.axis = axis;
			this.param({ axis, from: null, to: null });
			dispatchEvent(new Event('axis'));
		},
		zoomTo(lo, hi) {
			this.param(
				lo == null
					? { from: null, to: null }
					: { axis: this.axis, from: Number(lo.toPrecision(13)), to: Number(hi.toPrecision(13)) },
			);
		},
		resumeCommand() {
			return this.run.command || 'orchestrator train CONFIG run.name=' + this.run.name;
		},
		// actions: plan → confirm → done
		can(kind) {
			return this.actions.includes(kind);
		},
		async act(kind, point, more) {
			const asked = { ...(point ? { point } : {}), ...more },
				same = this.doing?.kind === kind ? this.doing : {};
			this.doing = {
				title:
					{ save: 'Save a resume point now', stop: 'Save and stop the run' }[kind] ||
					kind[0].toUpperCase() + kind.slice(1),
				command: null,
				verb: '',
				effects: [],
				...same,
				kind,
				point,
				asked,
				phase: 'plan',
				refusals: [],
				stale: '',
				foot: '',
				result: '',
			};
			this.$nextTick(() => {
				const d = document.querySelector('dialog.act');
				if (!d.open) d.showModal();
			});
			try {
				const plan = await post(runPath(this.name) + '/actions/' + kind + '/plan', asked);
				if (this.doing?.asked !== asked && raw(this.doing?.asked) !== asked) return;
				this.doing = {
					...this.doing,
					...plan,
					phase: 'confirm',
					foot:
						'attempt' in plan.basis
							? 'planned at attempt ' + (plan.basis.attempt ?? '–') + ', generation ' + (plan.basis.generation ?? '–')
							: '',
				};
			} catch (e) {
				if (this.doing) this.doing = { ...this.doing, phase: 'confirm', refusals: [e.message] };
			}
		},
		actTyped(name, value) {
			value = value.trim() || null;
			this.doing = { ...this.doing, asked: { ...raw(this.doing.asked), [name]: value }, phase: 'plan', refusals: [] };
			clearTimeout(this.typing);
			this.typing = setTimeout(() => this.doing && this.actOption(name, value), 250);
		},
		actOption(name, value) {
			const d = this.doing;
			this.act(d.kind, d.point, { ...raw(d.asked), [name]: value });
		},
		actNote(value) {
			// goes with the confirmation; of the plan only the command depends on it
			const asked = raw(this.doing.asked),
				kind = this.doing.kind;
			asked.why = value;
			clearTimeout(this.typing);
			this.typing = setTimeout(async () => {
				try {
					const plan = await post(runPath(this.name) + '/actions/' + kind + '/plan', asked);
					if (this.doing && raw(this.doing.asked) === asked && asked.why === value)
						this.doing = { ...this.doing, command: plan.command };
				} catch {
					/* the confirmation says it */
				}
			}, 250);
		},
		async actDo() {
			const d = this.doing;
			try {
				const got = await post(runPath(this.name) + '/actions/' + d.kind, {
					...raw(d.asked),
					token: d.token,
					basis: raw(d.basis),
				});
				this.doing = {
					...d,
					phase: 'run',
					foot: '',
					result:
						{
							save: 'Asked for, through storage. The run answers at its next step boundary …',
							stop: 'Asked for, through storage. The run answers at its next step boundary …',
							verify: 'Reading and comparing …',
						}[d.kind] || 'Under way …',
				};
				for (;;) {
					const at = await this.get('/actions/' + got.id);
					if (!this.doing) return;
					if (at.state !== 'running') {
						this.doing = { ...this.doing, phase: at.state, result: at.text, bad: at.is_bad };
						this.again();
						return;
					}
					if (at.text && at.text !== this.doing.result) this.doing = { ...this.doing, result: at.text };
					await new Promise((r) => setTimeout(r, 300));
				}
			} catch (e) {
				if (!this.doing) return;
				if (e.code !== 'run.changed_since_plan') {
					this.doing = { ...d, phase: 'confirm', refusals: [e.message] };
					return;
				}
				const names = {
					attempt: 'attempt',
					generation: 'generation',
					newest_point: 'newest point',
					state: 'state',
					point: 'point',
					pin: 'pin',
				};
				const what = Object.keys(names)
					.filter((k) => e.was[k] !== e.now[k])
					.map((k) => `${names[k]} was ${e.was[k] ?? 'none'}, now it is ${e.now[k] ?? 'none'}`);
				this.doing = {
					...d,
					stale:
						(what.join('; ').replace(/^./, (c) => c.toUpperCase()) || 'The plan was too old') +
						'. Look at the new plan before you confirm.',
					foot: '',
				};
			}
		},
		again() {
			// what an action may have changed is read anew
			this.get('')
				.then((d) => this.take(d))
				.catch(() => {});
			dispatchEvent(new Event('changed'));
			if (this.drawer?.kind === 'point') {
				const name = this.drawer.id;
				this.drawer.id = '';
				this.showPoint(name);
			}
		},
		canChoose() {
			return ['plan', 'confirm'].includes(this.doing.phase) && !this.doing.stale;
		},
		actAgain() {
			const d = this.doing;
			this.act(d.kind, d.point, raw(d.asked));
		},
		actClose() {
			document.querySelector('dialog.act').close();
		},
		actClosed() {
			this.doing = null;
		},
		phaseClass(p) {
			const at = this.doing.stale ? 0 : { plan: 0, confirm: 1, run: 2, done: 3, failed: 3 }[this.doing.phase],
				want = { plan: 0, confirm: 1, done: 2 }[p];
			return at === want ? 'now' : at > want ? 'done' : '';
		},
	}));

	// ------------------------------------------------------------ overview
	Alpine.data('overviewTab', () => ({
		tl: null,
		off: null,
		timer: 0,
		seen: '',
		plot: null,
		presets: [
			{ label: '1 h', s: 3600 },
			{ label: '6 h', s: 21600 },
			{ label: '24 h', s: 86400 },
			{ label: 'All', s: 0 },
		],
		init() {
			this.tl = keep(
				new Timeline(this.$refs.tl, {
					utc: () => f.zone.utc,
					point: (name) => this.param({ point: name }),
					event: (e) => {
						location.hash = this.link('events', 'attempt', e.attempt).slice(1);
					},
					range: (r) => (r ? this.zoomTo(r[0], r[1]) : this.zoomTo(null)),
				}),
			);
			this.$refs.tl.firstChild.setAttribute(
				'aria-label',
				'Timeline of attempts, workers, faults and resume points. Arrow keys go through the marks, plus and minus zoom.',
			);
			this.legend();
			listen(this, {
				redraw: () => {
					this.tl.recolor();
					this.mini();
					this.sparkline();
				},
				axis: () => {
					this.tl.setAxis(this.axis);
					this.legend();
				},
				summary: () => {
					const k = this.run && this.run.attempt + '.' + this.run.generation + '.' + this.run.point?.name;
					if (k !== this.seen) this.data();
				},
			});
			this.timer = setInterval(() => this.alive && this.data(), 30000);
			this.data();
		},
		destroy() {
			this.tl.destroy();
			clearInterval(this.timer);
			this.off();
			this.plot?.destroy();
		},
		async data() {
			this.seen = this.run.attempt + '.' + this.run.generation + '.' + this.run.point?.name;
			try {
				const d = await this.get('/timeline');
				d.alive = ALIVE.has(this.run.state) || this.run.state === 'gone';
				d.tail = { gone: 'no sign of life', waiting: 'waiting for workers' }[this.run.state];
				const r = this.range(),
					first = !this.tl.data;
				this.tl.axis = this.axis;
				this.tl.setData(d);
				if (first && r) this.tl.setRange(r[0], r[1], true);
				performance.mark('shown');
				this.legend();
				if (first) {
					this.mini();
					this.sparkline();
				}
			} catch (e) {
				this.say(e.message);
			}
		},
		legend() {
			const g = (name, cls, text) => h('span', {}, icon(name, 's ' + cls), text),
				box = (cls, text) => h('span', {}, h('i', { class: 'sw ' + cls }), text);
			const sw = (fill, extra) => {
				const v = s('svg', { viewBox: '0 0 12 12' });
				v.append(
					s('path', { d: 'M0 2h12v10H0z', fill, opacity: '.3' }),
					s('path', { d: 'M0 2h12', stroke: fill, 'stroke-width': 2 }),
				);
				return h('span', {}, v, extra);
			};
			const d = this.tl.data;
			if (!d) return;
			const fate = (n) => d.segments.some((x) => x.fate === n),
				did = (...k) => d.happenings.some((e) => k.includes(e.kind)),
				point = (n) => d.points.some((p) => p.state === n);
			this.$refs.legend.replaceChildren(
				...[
					d.segments.length && sw('var(--accent-g)', 'workers, on the history'),
					fate(1) && box('k-lost', 'lost work'),
					fate(2) && box('k-rewound', 'rewound'),
					did('worker', 'frozen', 'error', 'nosave', 'waiting') && g('fault', 'fault', 'worker lost'),
					did('crash', 'failed') && g('crash', 'fault', 'everything died'),
					did('rewind') && g('rewind', 'rewind', 'rewind'),
					did('resize', 'join') && g('change', 'accent', 'other shape'),
					did('resume', 'change') && g('resume', 'orphan', 'resumed'),
					point(0) && g('healthy', 'ok', 'healthy point, digests read'),
					point(0) && g('sizes', 'ok', 'sizes compared'),
					point(1) && g('pinned', 'ok', 'pinned'),
					point(2) && g('damaged', 'fault', 'damaged'),
					point(3) && g('orphan', 'orphan', 'orphan'),
					this.run.risk.steps && box('k-risk', 'at risk now'),
				].filter(Boolean),
			);
		},
		preset(sec) {
			if (!sec) return this.tl.reset();
			const hi = this.tl.end + sec * 0.015;
			this.tl.setRange(hi - sec * 1.015, hi);
		},
		isPreset(sec) {
			const p = this.params;
			if (!sec) return p.from == null;
			return p.from != null && this.tl?.full && Math.abs((p.to - p.from) / sec - 1.015) < 0.002 && p.to >= this.tl.end;
		},
		async mini() {
			const el = this.$refs.loss;
			if (!el) return;
			let data;
			try {
				data = await this.get('/series', {
					axis: 'tokens',
					metrics: 'loss',
					px: Math.max(120, Math.round(el.clientWidth)),
				});
			} catch {
				return;
			}
			this.plot?.destroy();
			el.replaceChildren();
			if (!data.i.length) {
				el.append(h('p', { class: 'muted pad' }, 'No step yet.'));
				return;
			}
			this.plot = keep(
				chart(el, { ...CHARTS[0], height: Math.max(160, Math.min(420, el.clientHeight - 10)) }, data, {
					clip: true,
					read: () => {},
					zoom: () => {
						location.hash = this.link('charts').slice(1);
					},
				}),
			);
		},
		async sparkline() {
			const el = this.$refs.spark;
			if (!el || !this.run.progress.step) return;
			try {
				const hi = this.run.last_step.t,
					d = await this.get('/series', {
						axis: 'time',
						metrics: 'tokens_per_s',
						px: 60,
						from: Math.max(hi - 21600, this.run.created),
						to: hi,
					}),
					v = d.history.tokens_per_s.mean,
					max = Math.max(...v),
					svg = s('svg', { viewBox: '0 0 60 18', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
				svg.append(
					s('path', {
						d: d.i.map((i, k) => (k ? 'L' : 'M') + i + ' ' + (17 - (v[k] / max) * 15).toFixed(1)).join(''),
						fill: 'none',
						stroke: 'var(--accent-g)',
						'stroke-width': 1.4,
						'vector-effect': 'non-scaling-stroke',
					}),
				);
				el.replaceChildren(svg);
			} catch {
				/* the number stands without it */
			}
		},
		wantedText() {
			const n = wanted(this.run);
			return n && 'of ' + n;
		},
		progressText() {
			const p = this.run.progress;
			return [
				p.share != null ? pct(p.share) : '',
				count(p.tokens) + (p.total_tokens && !p.eta_s ? ' of ' + count(p.total_tokens) : '') + ' tokens',
				p.eta_s ? ago(p.eta_s) + ' to go' : '',
			]
				.filter(Boolean)
				.join(' · ');
		},
		worldText() {
			const r = this.run;
			if (!this.alive) return r.state === 'starting' ? 'being started' : 'none alive';
			return !r.world_wanted
				? ''
				: r.world_size < r.world_wanted[1]
					? r.world_wanted[1] - r.world_size + ' missing'
					: 'for ' + span(this.now() - r.world_since);
		},
		pips() {
			const n = Math.min(16, this.run.world_wanted?.[1] || 0);
			return Array.from({ length: n }, (_, i) => ({ i, off: i < this.run.world_size ? '' : 'off' }));
		},
		speedText() {
			const x = this.run.speed;
			return x.step_s == null ? 'no step yet' : span(x.step_s) + ' a step · data wait ' + pct(x.data_wait_share, 1);
		},
		riskText() {
			const k = this.run.risk;
			if (!k.steps && (this.run.state === 'done' || this.run.state === 'stopped')) return 'saved at its end';
			return k.steps
				? int(k.steps) + ' steps · ' + span(k.seconds) + ' of work'
				: this.run.point
					? 'nothing since the newest point'
					: 'nothing is trained yet';
		},
		copiesText() {
			const n = this.run.risk.copies;
			return n == null ? '' : n > 1 ? 'one worker dead: nothing lost' : 'the same if this one worker dies';
		},
		riskShare() {
			const k = this.run.risk;
			return k.every_steps ? k.steps / k.every_steps : 0;
		},
		riskTitle() {
			const k = this.run.risk;
			return k.next_in_steps != null ? 'next save in ' + k.next_in_steps + ' steps' : '';
		},
		pointText() {
			const p = this.run.point;
			this.tick;
			if (!p) return 'a start would begin again';
			return p.t == null ? '' : past(p.t, this.now()) + ', ' + this.whenText(p.t);
		},
		pointsText() {
			const p = this.run.points;
			return [p.healthy ? p.healthy + ' healthy' : '', p.damaged ? p.damaged + ' damaged' : '']
				.filter(Boolean)
				.join(' · ');
		},
		goodText() {
			const g = this.run.goodput;
			return g.share == null ? 'no step yet' : 'last two days ' + pct(g.recent);
		},
		goodParts() {
			const g = this.run.goodput;
			return PARTS.map(([k]) => ({ k, share: g.parts[k] / g.wall_s })).filter((p) => p.share > 0.0005);
		},
		evalText() {
			const e = this.run.last_eval;
			const of = (p) => p.part + ' loss ' + f.short(p.loss);
			return e && 'Evaluated after step ' + int(e.step) + ': ' + e.parts.map(of).join(', ');
		},
		lossText() {
			const l = this.run.loss;
			return l.now == null
				? ''
				: 'mean of ' +
						l.steps +
						(l.steps === 1 ? ' step ' : ' steps ') +
						l.now.toFixed(3) +
						(l.before ? (l.now <= l.before ? ' ↓ ' : ' ↑ ') + Math.abs(l.now - l.before).toFixed(3) : '');
		},
	}));

	// ------------------------------------------------------------ resume points
	Alpine.data('pointsTab', () => ({
		state: 'all',
		q: '',
		counts: {},
		chips: [],
		table: null,
		off: null,
		init() {
			this.state = this.params.state || 'all';
			this.setChips({});
			const me = this,
				now = () => Date.now() / 1000 + me.offset;
			const word = (p) =>
				h(
					'span',
					{ class: 'state ' + f.pointWord(p) + (f.pointIcon(p) === 'pinned' ? ' pinned' : '') },
					icon(f.pointIcon(p), 's'),
					f.pointWord(p),
					p.state !== 'healthy' && p.pinned && icon('pinned', 's accent', 'pinned'),
				);
			this.table = keep(
				new VTable(this.$refs.table, {
					label: 'Resume points',
					page: 100,
					none: 'No resume point of this kind.',
					columns: [
						{ title: 'Health', width: '104px', term: 'healthy', cell: word },
						{ title: 'Step', width: '70px', num: true, sort: 'step', cell: (p) => int(p.step) },
						{
							title: 'When',
							width: 'minmax(128px,1.1fr)',
							sort: 't',
							cell: (p) =>
								h(
									'span',
									{ title: full(p.t) },
									when(p.t, now()),
									h('span', { class: 'faint' }, p.t == null ? '' : '  ' + ago(now() - p.t)),
								),
						},
						{
							title: 'Tokens',
							width: '70px',
							num: true,
							sort: 'tokens',
							term: 'tokens',
							cell: (p) => h('span', { title: int(p.consumed_tokens) }, count(p.consumed_tokens)),
						},
						{ title: 'Samples', min: 1160, width: '84px', num: true, cell: (p) => int(p.consumed_samples) },
						{
							title: 'Att · gen',
							width: '70px',
							num: true,
							term: 'attempt',
							cell: (p) => p.attempt + ' · ' + p.generation,
						},
						{ title: 'Workers', width: '58px', num: true, term: 'world', cell: (p) => int(p.world_size) },
						{ title: 'Batch', width: '48px', num: true, term: 'gbs', cell: (p) => int(p.global_batch_size) },
						{ title: 'Length', width: '56px', num: true, term: 'seqlen', cell: (p) => int(p.seq_len) },
						{ title: 'Size', width: '70px', num: true, sort: 'bytes', cell: (p) => f.bytes(p.bytes) },
						{
							title: 'Blocked',
							min: 980,
							width: '66px',
							num: true,
							sort: 'save_blocked_s',
							term: 'blocked',
							cell: (p) => span(p.save_blocked_s),
						},
						{
							title: 'Written',
							min: 1060,
							width: '64px',
							num: true,
							sort: 'save_s',
							term: 'written',
							cell: (p) => span(p.save_s),
						},
						{
							title: 'Checked',
							width: 'minmax(104px,.8fr)',
							term: 'checked',
							cell: (p) =>
								p.state === 'damaged'
									? h('span', { class: 'fault', title: p.reason }, p.reason)
									: h(
											'span',
											{ class: p.checked === 'digests' ? '' : 'faint' },
											p.checked === 'digests' ? 'digests ' + ago(now() - p.checked_at) + ' ago' : 'sizes',
										),
						},
						{
							title: 'Parent',
							min: 1340,
							width: 'minmax(150px,1fr)',
							term: 'parent',
							cell: (p) => h('span', { class: 'mono faint', title: p.parent || '' }, p.parent || 'the start'),
						},
					],
					compactHeight: 54,
					compact: (p) => [
						h(
							'div',
							{},
							h(
								'div',
								{ class: 'card1' },
								word(p),
								h('b', {}, 'step ' + int(p.step)),
								h('span', { class: 'faint grow num' }, past(p.t, now())),
							),
							h(
								'div',
								{ class: 'card2' },
								count(p.consumed_tokens) + ' tokens',
								h('span', {}, f.bytes(p.bytes)),
								h('span', {}, 'att ' + p.attempt + ' · gen ' + p.generation),
								h('span', { class: 'trunc' }, p.state === 'damaged' ? p.reason : p.pinned ? p.pin.reason : ''),
							),
						),
					],
					fetch: (q) => me.get('/points', q),
					loaded: (d) => {
						me.counts = d.counts;
						me.setChips(d.counts);
					},
					failed: (e) => me.say(e.message),
					open: (p) => me.param({ point: p.name }),
					selected: (p) => p.name === me.params.point,
					dim: (p) => p.state === 'orphan',
					stamp: (p) => p.name + p.pinned + p.checked,
				}),
			);
			this.table.sort = '-step';
			this.table.load({ state: this.state });
			this.$watch('q', (v) => this.table.load({ state: this.state, q: v }));
			this.$watch('params.point', () => this.table.render());
			listen(this, {
				step: (e) => this.move(e.detail),
				changed: () => this.table.load({ state: this.state, q: this.q }, true),
				redraw: () => this.table.refresh(),
				selection: () => this.table.render(),
			});
		},
		destroy() {
			this.table.destroy();
			this.off();
		},
		setChips(c) {
			this.chips = [
				['all', 'All', ''],
				['healthy', 'On the history', 'healthy'],
				['pinned', 'Pinned', 'pinned'],
				['damaged', 'Damaged', 'damaged'],
				['orphan', 'Orphans', 'orphan'],
			].map(([id, label, i]) => ({ id, label, icon: i, n: c[id] == null ? '' : int(c[id]) }));
		},
		choose(id) {
			this.state = id;
			this.param({ state: id === 'all' ? null : id });
			this.table.load({ state: id, q: this.q });
		},
		move(n) {
			const i = this.table.focusRow + n;
			if (i < 0 || i >= this.table.total) return;
			this.table.pick(i);
			const r = this.table.row(i);
			if (r) this.param({ point: r.name });
		},
		sizeText() {
			const p = this.run.points;
			return (
				f.bytes(p.bytes) +
				' in storage, ' +
				f.bytes(this.run.files.free_bytes) +
				' free' +
				(p.deleted ? ' · ' + int(p.deleted) + ' deleted by retention' : '')
			);
		},
	}));

	// ------------------------------------------------------------ lineage
	const WHY = {
		start: 'Start',
		fork: 'Fork',
		resume: 'Resume',
		rewind: 'Rewind',
		coordinator_restarted: 'Coordinator restarted',
		unreadable: 'Claim unreadable',
	};
	Alpine.data('lineageTab', () => ({
		routine: false,
		total: 0,
		all: 0,
		elsewhere: '',
		table: null,
		off: null,
		init() {
			const me = this,
				now = () => Date.now() / 1000 + me.offset;
			const why = (r) =>
				r.forked_from
					? h(
							'span',
							{ class: 'row' },
							icon('branch', 's accent'),
							r.forked_from.is_here
								? h(
										'a',
										{
											href: '#/run/' + encodeURIComponent(r.forked_from.run) + '/points?point=' + r.forked_from.point,
											title: r.forked_from.point,
										},
										'Fork of ' + r.forked_from.run,
									)
								: h(
										'span',
										{
											class: 'trunc',
											title: r.forked_from.uri + ' at ' + r.forked_from.point + ': not in this storage folder',
										},
										'Fork of ' + r.forked_from.uri,
									),
						)
					: h(
							'span',
							{ class: 'row' },
							icon(
								{
									start: 'start',
									resume: 'resume',
									rewind: 'rewind',
									fork: 'branch',
									coordinator_restarted: 'coordinator',
								}[r.why] || 'warn',
								's ' + (r.why === 'rewind' ? 'rewind' : 'muted'),
							),
							WHY[r.why] || r.why,
						);
			const ended = (r) =>
				r.newest && !r.outcome
					? h('span', { class: 'ok' }, ALIVE.has(me.run.state) ? 'the newest attempt' : 'no end written')
					: r.outcome
						? h(
								'span',
								{ title: r.reason, class: r.outcome === 'failed' ? 'fault' : '' },
								r.outcome + (r.ended_by ? ', ' + r.ended_by : ''),
							)
						: r.next_why === 'coordinator_restarted'
							? h('span', { class: 'faint' }, 'coordinator restarted')
							: h('span', { class: 'fault' }, 'died, no end written');
			const changes = (r) =>
				r.changes.length
					? r.changes
							.map(
								(d) =>
									(d.field.startsWith('data.sources.') ? d.field.slice(13) : d.field.split('.').pop()) +
									' ' +
									(Array.isArray(d.old) ? 'changed' : f.val(d.old) + ' → ' + f.val(d.new)),
							)
							.join(', ')
					: '';
			const fates = (r) => Object.entries(r.aside_by_fate),
				spanned = (r) =>
					r.first_step === r.last_step ? int(r.last_step) : int(r.first_step) + ' – ' + int(r.last_step);
			const aside = (r) =>
				r.aside
					? h(
							'span',
							{
								title: fates(r)
									.map(([fate, n]) => int(n) + ' ' + fate)
									.join(', '),
							},
							fates(r).map(([fate, n], i) => [
								i ? ', ' : '',
								h('span', { class: fate === 'rewound' ? 'rewind' : 'fault' }, int(n) + ' ' + fate),
							]),
						)
					: h('span', { class: 'faint' }, '0');
			const forked = (x) =>
				x.is_here
					? h(
							'a',
							{ href: '#/run/' + encodeURIComponent(x.run) + '/lineage' },
							icon('branch', 's'),
							' forked at step ' + int(x.step) + ': ' + x.run + ' ',
						)
					: h(
							'span',
							{ title: x.path + ': not in this storage folder; the pin on ' + x.point + ' names it' },
							icon('branch', 's'),
							' forked at step ' + int(x.step) + ': ',
							h('span', { class: 'mono' }, x.path),
							' ',
						);
			this.table = keep(
				new VTable(this.$refs.table, {
					label: 'Attempts, newest first',
					page: 200,
					rowHeight: 34,
					compactHeight: 54,
					compactColumns: '64px minmax(0,1fr)',
					columns: [
						{ title: '', name: 'Graph', width: '72px', cell: rail },
						{ title: 'Attempt', width: '58px', num: true, term: 'attempt', cell: (r) => h('b', {}, r.attempt) },
						{ title: 'Why it began', width: '170px', cell: why },
						{
							title: 'Began',
							width: '150px',
							cell: (r) =>
								h(
									'span',
									{ title: full(r.t0) },
									when(r.t0, now()),
									h('span', { class: 'faint' }, r.t0 == null ? '' : '  ' + ago(now() - r.t0)),
								),
						},
						{
							title: 'Steps',
							width: '150px',
							num: true,
							term: 'label',
							cell: (r) => (r.first_step == null ? '–' : spanned(r)),
						},
						{
							title: 'Workers',
							min: 1180,
							width: '92px',
							term: 'world',
							cell: (r) =>
								r.worlds.length > 5 ? r.worlds[0] + '→…→' + r.worlds[r.worlds.length - 1] : r.worlds.join('→'),
						},
						{ title: 'Trained', min: 1340, width: '66px', num: true, cell: (r) => int(r.trained) },
						{ title: 'Set aside', width: '132px', num: true, term: 'orphan', cell: aside },
						{ title: 'How it ended', min: 980, width: 'minmax(130px,.8fr)', cell: ended },
						{
							title: 'Changed',
							width: 'minmax(160px,1.4fr)',
							cell: (r) => [r.forks.map(forked), h('span', { class: 'mono', title: changes(r) }, changes(r))],
						},
					],
					compact: (r) => [
						rail(r),
						h(
							'div',
							{},
							h(
								'div',
								{ class: 'card1' },
								h('b', {}, r.attempt),
								why(r),
								h('span', { class: 'faint grow num' }, past(r.t0, now())),
							),
							h(
								'div',
								{ class: 'card2' },
								r.first_step == null ? 'no step' : spanned(r),
								r.aside ? aside(r) : null,
								r.forks.map(forked),
								h('span', { class: 'trunc' }, changes(r)),
							),
						),
					],
					fetch: (q) => me.get('/attempts', q),
					loaded: (d) => {
						me.total = d.total;
						me.all = d.all;
						if (d.offset === 0) me.elsewhere = elsewhere(d.rows);
					},
					failed: (e) => me.say(e.message),
					open: (r) => {
						location.hash = me.link('events', 'attempt', r.attempt).slice(1);
					},
					dim: (r) => !r.on_history,
				}),
			);
			this.table.load({});
			this.$watch('routine', (v) => this.table.load(v ? { routine: 1 } : {}));
			listen(this, { redraw: () => this.table.refresh() });
		},
		destroy() {
			this.table.destroy();
			this.off();
		},
		left() {
			return this.all - this.total;
		},
		text() {
			const n = this.left();
			return this.all
				? (n ? int(this.total) + ' of ' : '') +
						int(this.all) +
						(this.all === 1 ? ' attempt' : ' attempts') +
						', newest first' +
						(n ? '; ' + int(n) + (n === 1 ? ' plain restart' : ' plain restarts') + ' of the coordinator left out' : '')
				: '';
		},
	}));
	function elsewhere(rows) {
		const forks = rows
			.flatMap((r) => r.forks)
			.filter((x) => !x.is_here)
			.map((x) => 'step ' + int(x.step) + ' in ' + x.path);
		return forks.length
			? 'Forks outside this storage folder, as the pins of their points say: ' + forks.join('; ') + '.'
			: '';
	}
	function rail(r) {
		const H = innerWidth < 720 ? 54 : 34,
			X = (l) => 9 + Math.min(l, 4) * 13,
			v = s('svg', {
				class: 'rail',
				width: 72,
				height: H,
				viewBox: `0 0 72 ${H}`,
				role: 'img',
				'aria-label': r.on_history ? 'on the history' : 'orphan branch',
			});
		const line = (d, main) =>
			v.append(
				s('path', {
					d,
					fill: 'none',
					stroke: main ? 'var(--accent-g)' : 'var(--orphan)',
					'stroke-width': main ? 2 : 1.6,
					...(main ? {} : { 'stroke-dasharray': '3 2' }),
				}),
			);
		const m = H / 2;
		for (const l of r.through) {
			if (l === r.lane || r.joins.includes(l)) continue;
			line(`M${X(l)} 0V${H}`, l === 0);
		}
		if (r.lane !== 0 && !r.through.includes(0)) line(`M${X(0)} 0V${H}`, true);
		const tip = r.lane === 0 ? r.newest : !r.above.includes(r.lane);
		line(`M${X(r.lane)} ${tip ? m : 0}V${r.why === 'start' || r.why === 'fork' ? m : H}`, r.lane === 0);
		for (const l of r.joins) line(`M${X(l)} 0C${X(l)} ${m} ${X(r.lane) + 4} ${m - 3} ${X(r.lane)} ${m}`, false);
		const lost = !r.aside_by_fate.rewound;
		if (r.aside && r.on_history) {
			line(`M${X(0)} ${m}h${lost ? 12 : 9}`, false);
			v.append(
				s('path', {
					d: lost ? `M${X(0) + 12} ${m - 3}l6 6m0-6l-6 6` : `M${X(0) + 11} ${m - 4}v8`,
					stroke: lost ? 'var(--fault-g)' : 'var(--rewind-g)',
					'stroke-width': 1.8,
				}),
			);
		}
		v.append(
			r.why === 'rewind'
				? s(
						'g',
						{},
						s('circle', { cx: X(r.lane), cy: m, r: 9, fill: 'var(--panel)' }),
						s('path', {
							d: `M${X(r.lane) + 6} ${m - 5}v10l-6-5zM${X(r.lane)} ${m - 5}v10l-6-5z`,
							fill: 'var(--rewind-g)',
						}),
					)
				: s('circle', {
						cx: X(r.lane),
						cy: m,
						r: r.why === 'coordinator_restarted' ? 3 : 4.5,
						fill: r.on_history ? 'var(--accent-g)' : 'var(--panel)',
						stroke: r.on_history ? 'var(--panel)' : 'var(--orphan)',
						'stroke-width': 1.5,
					}),
		);
		return v;
	}

	// ------------------------------------------------------------ charts
	Alpine.data('chartsTab', () => ({
		specs: CHARTS,
		clip: true,
		text: '',
		plots: [],
		off: null,
		late: 0,
		got: null,
		marks: null,
		init() {
			this.plots = keep([]);
			this.$nextTick(() => this.draw());
			const draw = () => this.draw();
			listen(this, {
				redraw: draw,
				axis: draw,
				resize: () => {
					clearTimeout(this.late);
					this.late = setTimeout(draw, 150);
				},
			});
			this.$watch('clip', () => this.paint());
		},
		destroy() {
			this.plots.forEach((p) => p.destroy());
			this.off();
		},
		el(key) {
			return this.$root.querySelector('[data-chart="' + key + '"]');
		},
		zoom(lo, hi) {
			if (lo == null) this.zoomTo(null);
			else this.zoomTo(lo, hi);
			this.draw();
		},
		async draw() {
			const r = this.range(),
				px = Math.max(160, Math.round(this.el('loss').clientWidth)),
				query = { axis: this.axis, from: r?.[0], to: r?.[1] };
			try {
				const [wide, narrow, line] = await Promise.all([
					this.get('/series', { ...query, metrics: 'loss', px }),
					this.get('/series', {
						...query,
						metrics: [...CHARTS.slice(1).map((c) => c.key), 'own'].join(','),
						px: Math.round(px / 2),
					}),
					this.marks || this.get('/timeline'),
				]);
				if (!this.marks) {
					const c = line.happenings.columns,
						at = (n) => c.indexOf(n);
					this.marks = line.happenings.rows
						.filter((x) => ['rewind', 'resize', 'change'].includes(x[at('kind')]))
						.map((x) => ({ t: x[at('t')], k: x[at('k')], kind: x[at('kind')] }));
				}
				performance.mark('charts');
				this.got = keep({ wide, narrow });
				this.text = int(wide.steps) + ' steps of the history' + (r ? ' in this range' : '');
				this.specs = [...CHARTS, ...narrow.own.map(ownChart)];
				await this.$nextTick();
				this.paint();
			} catch (e) {
				this.say(e.message);
			}
		},
		paint() {
			if (!this.got) return;
			this.plots.forEach((p) => p.destroy());
			this.plots = keep([]);
			for (const c of this.specs) {
				const el = this.el(c.key),
					d = c.wide ? this.got.wide : this.got.narrow;
				el.replaceChildren();
				if (!d.i.length) {
					el.append(h('p', { class: 'muted pad' }, 'No step in this range.'));
					continue;
				}
				if (!d.history[c.key].mean.some((v) => v != null)) {
					el.append(h('p', { class: 'muted pad' }, 'Not recorded by the version that trained here.'));
					continue;
				}
				this.plots.push(
					keep(
						chart(el, c, d, {
							clip: this.clip,
							marks: this.marks,
							read: (spec, v) => this.readOut(spec, v),
							zoom: (a, b) => this.zoom(a, b),
						}),
					),
				);
				this.readOut(c, null);
			}
		},
		readOut(spec, v) {
			const el = this.$root.querySelector('[data-read="' + spec.key + '"]');
			if (!el) return;
			if (!v || v.v == null) {
				const d = spec.wide ? this.got.wide : this.got.narrow,
					m = d.history[spec.key],
					list = (spec.peak ? m.max : m.mean).filter((x) => x != null);
				el.textContent = list.length ? 'last ' + spec.fmt(list[list.length - 1]) : '';
				return;
			}
			el.textContent =
				xText(this.axis, v.x) +
				' · ' +
				spec.fmt(v.v) +
				(v.lo != null && v.hi != null && v.lo !== v.hi ? ' (' + spec.fmt(v.lo) + ' to ' + spec.fmt(v.hi) + ')' : '') +
				(v.aside != null ? ' · orphan ' + spec.fmt(v.aside) : '');
		},
	}));

	// ------------------------------------------------------------ data
	Alpine.data('dataTab', () => ({
		d: null,
		async init() {
			try {
				const d = await this.get('/sources');
				d.sources.forEach((x) => {
					x.shown = x.actual_since ?? x.actual;
				});
				this.d = d;
			} catch (e) {
				this.say(e.message);
			}
		},
		asOf() {
			const d = this.d,
				at = (t) => when(t, this.now()),
				c = d.counted_at;
			return [
				c &&
					'tokens as of ' +
						(c.attempt == null ? 'the newest step' : 'the start of attempt ' + c.attempt) +
						', ' +
						at(c.t),
				d.at && 'documents as of ' + at(d.at),
				d.since && 'weights last changed ' + at(d.since),
			]
				.filter(Boolean)
				.join(' · ');
		},
		encoderText() {
			const e = this.d.encoder;
			return e.name ? e.name + ' ' + e.version + ' · ' + int(e.differences) + ' documents encoded differently' : '–';
		},
		orderText() {
			const o = this.d.order;
			return o.shuffle == null ? '–' : 'shuffle: ' + o.shuffle + ', seed ' + o.seed;
		},
		shareTitle(x) {
			return pct(x.shown, 2) + ' against a target of ' + pct(x.target, 2);
		},
		epochText(x) {
			if (x.epoch == null) return '–';
			return x.num_blocks ? (x.epoch + x.block / x.num_blocks).toFixed(2) : String(x.epoch);
		},
		cursorText(x) {
			const c = x.cursor;
			return c.block == null
				? '–'
				: 'block ' +
						int(c.block) +
						(x.num_blocks ? '/' + int(x.num_blocks) : '') +
						(this.packs()
							? ' · window ' + int(c.window) + ' · ' + int(c.packs) + ' packs taken'
							: ' · record ' + int(c.record) + ' · token ' + int(c.token));
		},
		packs() {
			return ['bestfit', 'pad'].includes(this.d.pack_mode);
		},
		skipText() {
			const bad = this.d.sources.reduce((a, x) => a + (x.bad || 0), 0),
				all = this.d.sources.reduce((a, x) => a + (x.documents || 0), 0);
			return all
				? int(bad) +
						' of ' +
						int(all) +
						' (' +
						((bad / all) * 100).toFixed(4) +
						' %), the run stops at ' +
						pct(this.d.max_bad_share, 0)
				: '';
		},
		leftOut() {
			const sum = (k) => this.d.sources.reduce((a, x) => a + (x[k] || 0), 0);
			return (
				(sum('filtered') ? ' · ' + int(sum('filtered')) + ' dropped by transforms' : '') +
				(sum('held_out') ? ' · ' + int(sum('held_out')) + ' held out' : '')
			);
		},
		auditText() {
			const a = this.d.audit;
			return a.exactly_once
				? 'Every token was trained exactly once, up to step ' + int(a.final_up_to_step) + '.'
				: a.exactly_once === null
					? 'Not proven: lines of the journal are lost.'
					: 'The history differs from the files.';
		},
		auditMore() {
			const a = this.d.audit;
			return (
				'steps ' +
				a.first_step +
				' to ' +
				int(a.last_step) +
				', ' +
				int(a.samples) +
				' samples, ' +
				count(a.tokens) +
				' tokens, in ' +
				span(a.seconds)
			);
		},
	}));

	// ------------------------------------------------------------ cards: declared in inspect/views/cards.py
	const CELLS = { number: int, decimal: f.short, count, seconds: span, bytes: f.bytes, share: pct };
	Alpine.data('cardsTab', () => ({
		cards: null,
		async init() {
			try {
				this.cards = (await this.get('/cards')).cards;
			} catch (e) {
				this.say(e.message);
			}
		},
		isNumber(column) {
			return column.kind !== 'text' && column.kind !== 'time';
		},
		cell(column, value) {
			if (value == null) return '–';
			if (column.kind === 'time') return when(value, this.now());
			return (CELLS[column.kind] || String)(value);
		},
		hint(column, value) {
			return column.kind === 'time' ? full(value) : column.kind === 'count' ? int(value) : '';
		},
	}));

	// ------------------------------------------------------------ goodput
	Alpine.data('goodputTab', () => ({
		d: null,
		parts: [],
		days: [],
		async init() {
			try {
				const [d, W] = await Promise.all([this.get('/goodput'), words()]),
					wall = Object.values(d.parts).reduce((a, b) => a + b, 0) || 1;
				const shares = round100(PARTS.map(([k]) => d.parts[k] / wall));
				this.parts = PARTS.map(([k, label], i) => ({
					k,
					label,
					share: d.parts[k] / wall,
					pct: shares[i],
					time: span(d.parts[k]),
					means: W[k][1],
					s: d.parts[k],
				})).filter((p) => p.s > 0);
				this.days = d.days.map((x) => {
					const all = Object.values(x.parts).reduce((a, b) => a + b, 0) || 1;
					return {
						day: x.day,
						label: new Date(x.day * 1000).toLocaleDateString('en-GB', {
							day: 'numeric',
							month: 'short',
							timeZone: 'UTC',
						}),
						pct: pct((x.parts.productive || 0) / all, 0),
						title: PARTS.filter(([k]) => x.parts[k])
							.map(([k, l]) => l + ' ' + pct(x.parts[k] / all))
							.join('\n'),
						parts: PARTS.filter(([k]) => x.parts[k]).map(([k]) => ({ k, share: x.parts[k] / all })),
					};
				});
				this.d = d;
			} catch (e) {
				this.say(e.message);
			}
		},
		text() {
			return this.parts.length
				? this.parts[0].pct + ' of ' + span(this.d.wall_s) + ' went into steps that still count'
				: 'no step yet';
		},
		sum() {
			return (this.parts.reduce((a, p) => a + Math.round(parseFloat(p.pct) * 100), 0) / 100).toFixed(2) + ' %';
		},
		spoken() {
			return this.parts.map((p) => p.label + ' ' + p.pct).join(', ');
		},
		offText() {
			return this.d.off_s > 1 ? 'not counted: off for ' + span(this.d.off_s) + ' after a wanted stop' : '';
		},
	}));

	// ------------------------------------------------------------ events
	Alpine.data('eventsTab', () => ({
		levels: ['fault', 'change', 'point', 'data'],
		q: '',
		counts: {},
		chips: [],
		table: null,
		off: null,
		init() {
			const me = this,
				now = () => Date.now() / 1000 + me.offset;
			this.setChips({});
			if (this.params.level) this.levels = this.params.level.split(',');
			this.q = this.params.q || '';
			this.table = keep(
				new VTable(this.$refs.table, {
					label: 'Events, newest first',
					page: 100,
					compactHeight: 54,
					none: 'No event of this kind.',
					columns: [
						{ title: 'When', width: '122px', cell: (e) => h('span', { title: full(e.t) }, when(e.t, now())) },
						{
							title: '',
							name: 'Ago',
							width: '58px',
							num: true,
							cell: (e) => h('span', { class: 'faint' }, ago(now() - e.t)),
						},
						{
							title: 'Kind',
							width: '160px',
							cell: (e) =>
								h(
									'span',
									{ class: e.level === 'fault' ? 'row fault' : 'row' },
									icon(e.level, 's'),
									h('span', { class: 'trunc' }, e.kind),
								),
						},
						{ title: 'Attempt', width: '58px', num: true, term: 'attempt', cell: (e) => e.attempt },
						{ title: 'What', width: 'minmax(0,1fr)', cell: (e) => h('span', { title: e.text }, e.text) },
					],
					compact: (e) => [
						h(
							'div',
							{},
							h(
								'div',
								{ class: 'card1' },
								icon(e.level, 's ' + (e.level === 'fault' ? 'fault' : 'muted')),
								h('b', { class: 'trunc' }, e.kind),
								h('span', { class: 'faint grow num' }, ago(now() - e.t) + ' ago'),
							),
							h('div', { class: 'card2' }, h('span', { class: 'trunc' }, e.text)),
						),
					],
					fetch: (q) => me.get('/events', q),
					loaded: (d) => {
						me.counts = d.counts;
						me.setChips(d.counts);
					},
					failed: (e) => me.say(e.message),
					open: (e) => {
						me.param({ event: e.id });
					},
					selected: (e) => e.id === me.params.event,
				}),
			);
			this.load();
			this.$watch('q', (v) => {
				this.param({ q: v });
				this.load();
			});
			this.$watch('params.event', () => this.table.render());
			listen(this, { redraw: () => this.table.refresh() });
		},
		destroy() {
			this.table.destroy();
			this.off();
		},
		load() {
			this.table.load({ level: this.levels.join(','), q: this.q, attempt: this.params.attempt });
		},
		toggle(id) {
			this.levels = this.levels.includes(id) ? this.levels.filter((x) => x !== id) : [...this.levels, id];
			this.setChips(this.counts);
			this.load();
		},
		clearAttempt() {
			this.param({ attempt: null });
			this.load();
		},
		setChips(c) {
			this.chips = [
				['fault', 'Faults'],
				['change', 'Changes'],
				['point', 'Points'],
				['data', 'Data'],
				['routine', 'Routine'],
			].map(([id, label]) => ({ id, label, icon: id, n: c[id] == null ? '' : int(c[id]) }));
		},
	}));

	// ------------------------------------------------------------ what if
	Alpine.data('planTab', () => ({
		point: '',
		points: [],
		a: null,
		problem: '',
		layouts: [],
		late: 0,
		asked: 0,
		fields: [
			{ id: 'num_workers', label: 'workers', term: 'world', value: '', was: null },
			{ id: 'global_batch_size', label: 'global batch size', term: 'gbs', value: '', was: null },
			{ id: 'micro_batch_size', label: 'micro-batch size', term: 'micro', value: '', was: null },
			{ id: 'seq_len', label: 'sequence length', term: 'seqlen', value: '', was: null },
		],
		async init() {
			this.point = this.params.from_point || '';
			try {
				const d = await this.get('/points', { limit: 60 });
				this.points = d.rows;
			} catch (e) {
				this.problem = e.message;
			}
			this.reset(true);
		},
		pickPoint(el) {
			const list = this.points;
			el.replaceChildren(
				h('option', { value: '' }, 'the newest healthy one'),
				...list.map((p) =>
					h(
						'option',
						{ value: p.name, selected: p.name === this.point },
						'step ' + int(p.step) + ' · ' + f.pointWord(p) + ' · ' + p.name,
					),
				),
				...(this.point && !list.some((p) => p.name === this.point)
					? [h('option', { value: this.point, selected: true }, this.point)]
					: []),
			);
			el.value = this.point;
		},
		reset(first) {
			const c = this.run.config,
				w = c['cluster.num_workers'],
				now = {
					num_workers: Array.isArray(w) ? '[' + w.join(', ') + ']' : w,
					global_batch_size: c['train.global_batch_size'],
					micro_batch_size: c['train.micro_batch_size'],
					seq_len: c['pack.seq_len'],
				};
			this.fields.forEach((x) => {
				x.was = now[x.id] ?? null;
				x.value = String((first && this.params[x.id]) || (now[x.id] ?? ''));
			});
			this.ask();
		},
		edit(field, value) {
			field.value = value;
			clearTimeout(this.late);
			this.late = setTimeout(() => this.ask(), 160);
		},
		from(name) {
			this.point = name;
			this.ask();
		},
		values() {
			return Object.fromEntries(this.fields.map((x) => [x.id, x.value.trim()]));
		},
		async ask() {
			const v = this.values(),
				n = ++this.asked;
			this.param({ ...v, from_point: this.point });
			try {
				const a = await this.get('/plan', { ...v, point: this.point });
				if (n !== this.asked) return;
				this.a = a;
				this.problem = '';
				this.layouts = a.layout.map((l) => this.lay(l));
			} catch (e) {
				if (n === this.asked) {
					this.a = null;
					this.problem = e.message;
				}
			}
		},
		lay(l) {
			const show = l.per_worker.slice(0, 8),
				max = Math.min(48, l.rounds);
			return {
				world: l.world_size,
				text: `${l.num_micro} micro-batches on ${l.world_size} worker${l.world_size === 1 ? '' : 's'}: ${l.rounds} round${l.rounds === 1 ? '' : 's'}, idle for ${pct(l.idle, 0)} of a step`,
				more: l.per_worker.length > 8 ? `and ${l.per_worker.length - 8} more workers` : '',
				workers: show.map((n, i) => ({
					i,
					name: 'worker ' + i,
					cells: Array.from({ length: max }, (_, k) => (k < n ? '' : 'idle')),
				})),
			};
		},
		headline() {
			const a = this.a;
			return a.action === 'refuse'
				? 'What it would have been'
				: a.point === null
					? 'It would start from the beginning'
					: 'It would resume from step ' + int(a.step_before) + ', ' + a.point;
		},
		labelText() {
			return this.a.point === null
				? int(this.a.step_after)
				: int(this.a.step_before) + (this.a.step_after === this.a.step_before ? '' : ' → ' + int(this.a.step_after));
		},
		labelMore() {
			return this.a.point === null
				? 'no step is trained yet'
				: this.a.step_after === this.a.step_before
					? 'the same'
					: 'counted anew for ' + count(this.a.tokens_per_step[1]) + ' tokens a step';
		},
		placeMore() {
			return this.a.point === null
				? 'the first token of the stream is next'
				: 'the same: continues at exactly the next unread token';
		},
		lrMore() {
			return this.a.lr_before === null
				? 'of the first step'
				: this.a.lr_before === this.a.lr_after
					? 'does not jump: it follows the tokens'
					: 'was ' + f.lr(this.a.lr_before);
		},
		lrText() {
			return f.lr(this.a.lr_after);
		},
		remainText() {
			const a = this.a;
			return [
				a.remaining_tokens != null ? count(a.remaining_tokens) + ' tokens' : '',
				a.estimate.remaining_s ? 'about ' + ago(a.estimate.remaining_s) + ', if speed grows with the workers' : '',
			]
				.filter(Boolean)
				.join(' · ');
		},
		targetText(s) {
			const then = pct(s.target);
			return s.ended
				? 'at its end'
				: s.target_before == null || s.target_before === s.target
					? then
					: pct(s.target_before) + ' → ' + then;
		},
		skipText() {
			const s = this.a.skip;
			return s
				? 'leaves out ' +
						int(s.samples) +
						' samples, at most ' +
						count(s.tokens) +
						' tokens, from sample ' +
						int(s.first_index) +
						' on'
				: '';
		},
		tokText() {
			const [x, y] = this.a.tokens_per_step;
			return count(y) + ' tokens a step' + (x === y ? '' : ', ' + count(x) + ' before');
		},
		ruleText(r) {
			return (r || '–').replace('_', ' ');
		},
		ruleClass(r) {
			return { same: 'fault', may_change: 'warn', free: '' }[r];
		},
	}));
});

function round100(shares) {
	// largest remainder: what is shown sums to exactly 100.00 %
	const n = shares.map((x) => x * 10000),
		low = n.map(Math.floor);
	let rest = 10000 - low.reduce((a, b) => a + b, 0);
	n.map((x, i) => [x - low[i], i])
		.sort((a, b) => b[0] - a[0])
		.forEach(([, i]) => {
			if (rest > 0 && shares[i] > 0) {
				low[i]++;
				rest--;
			}
		});
	return low.map((x) => (x / 100).toFixed(2) + ' %');
}

// A command and a button that copies it.
customElements.define(
	'copy-line',
	class extends HTMLElement {
		static observedAttributes = ['cmd'];
		attributeChangedCallback() {
			const t = this.getAttribute('cmd');
			this.replaceChildren(
				h('code', { tabindex: '0' }, t),
				h(
					'button',
					{ class: 'btn', type: 'button', onclick: () => Alpine.$data(document.body).copy(t) },
					icon('copy', 's'),
					'Copy',
				),
			);
		}
	},
);

customElements.define(
	'i-c',
	class extends HTMLElement {
		// an icon: <i-c n="copy">
		static observedAttributes = ['n'];
		attributeChangedCallback() {
			const u = this.querySelector('use'),
				n = this.getAttribute('n');
			if (u) u.setAttribute('href', '#i-' + n);
			else this.append(icon(n));
		}
	},
);

// One tooltip for every dotted word: hover, focus, tap.
function tooltips() {
	const tip = document.getElementById('tip');
	let at = null;
	const show = async (el) => {
		at = el;
		const w = (await words())[el.dataset.term];
		if (!w || at !== el) return;
		tip.replaceChildren(h('b', {}, w[0]), document.createTextNode(w[1]));
		tip.hidden = false;
		el.setAttribute('aria-describedby', 'tip');
		const r = el.getBoundingClientRect(),
			host = el.closest('dialog[open]') || document.body;
		if (tip.parentNode !== host) host.append(tip);
		tip.style.left = Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, r.left)) + 'px';
		tip.style.top =
			(r.bottom + tip.offsetHeight + 12 > innerHeight ? r.top - tip.offsetHeight - 6 : r.bottom + 6) + 'px';
	};
	const hide = () => {
		if (at) at.removeAttribute('aria-describedby');
		at = null;
		tip.hidden = true;
	};
	document.addEventListener('pointerover', (e) => {
		const el = e.target.closest?.('[data-term]');
		if (el) show(el);
		else if (at && !at.matches(':focus-visible')) hide();
	});
	document.addEventListener('focusin', (e) => {
		const el = e.target.closest?.('[data-term]');
		if (el && el.matches(':focus-visible')) show(el);
		else hide();
	});
	document.addEventListener('click', (e) => {
		const el = e.target.closest?.('.term');
		if (el) show(el);
	});
	document.addEventListener('keydown', (e) => {
		if (e.key === 'Escape') hide();
	});
	document.addEventListener('scroll', hide, true);
}
