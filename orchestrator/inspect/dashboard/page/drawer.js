// What the drawer shows of a resume point and of an event.
import { ago, past, bytes, count, full, h, icon, int, pct, short, span, val, when } from './fmt.js';

const term = (id, text) => h('button', { class: 'term', 'data-term': id }, text);
const kv = (rows) =>
	h(
		'dl',
		{ class: 'kv' },
		rows.filter(Boolean).flatMap(([k, v]) => [h('dt', {}, k), h('dd', {}, v)]),
	);
const section = (title, ...body) => h('section', {}, h('h3', {}, title), ...body);

export function drawPoint(d, app) {
	const p = d.point,
		now = d.now,
		out = [];
	const can = (kind) => app.can(kind),
		act = (kind, label, name, cls) =>
			h('button', { class: 'btn ' + (cls || ''), onclick: () => app.act(kind, p.name) }, icon(name, 's'), label);
	const state = [];
	if (p.state === 'damaged')
		state.push(
			h(
				'div',
				{ class: 'banner' },
				icon('damaged', 'fault'),
				h(
					'div',
					{},
					h('h2', {}, 'Damaged'),
					h('p', {}, p.reason),
					p.quarantined &&
						h(
							'p',
							{ class: 'muted' },
							`Quarantined by ${p.mark.by || 'somebody'}, ${past(p.mark.t, now)}. Verify lifts that when every byte is right again.`,
						),
					h('p', { class: 'muted' }, 'A start names it and takes the newest whole point before it.'),
				),
			),
		);
	if (p.away)
		state.push(
			h(
				'div',
				{ class: 'banner warn' },
				icon('sizes', 'muted'),
				h('div', {}, h('h2', {}, 'Out of reach from here'), h('p', {}, p.away)),
			),
		);
	if (p.orphan_why)
		state.push(
			h(
				'div',
				{ class: 'banner warn' },
				icon('orphan', 'muted'),
				h(
					'div',
					{},
					h('h2', {}, 'Not on the history'),
					h('p', {}, p.orphan_why[0].toUpperCase() + p.orphan_why.slice(1) + '.'),
					h(
						'p',
						{ class: 'muted' },
						'It is kept for the record. This run never resumes it' + (p.state === 'damaged' ? '.' : '; a fork can.'),
					),
				),
			),
		);
	out.push(
		h(
			'section',
			{},
			...state,
			h(
				'div',
				{ class: 'row wrap acts' },
				p.state === 'healthy' && can('rewind') && act('rewind', 'Rewind to here…', 'rewind'),
				act('verify', 'Verify', 'verify'),
				p.pinned ? act('unpin', 'Unpin', 'pin') : p.state !== 'damaged' && act('pin', 'Pin', 'pin'),
				p.state !== 'damaged' && can('fork') && act('fork', 'Fork…', 'branch'),
				p.state !== 'damaged' && can('export') && act('export', 'Export', 'save'),
				p.state !== 'damaged' &&
					h('a', { class: 'btn', href: app.link('plan', 'from_point', p.name) }, icon('shape', 's'), 'What if'),
			),
		),
	);
	if (d.aside)
		out.push(
			section(
				'If you go back here',
				d.aside.steps
					? h(
							'p',
							{},
							`${int(d.aside.steps)} steps are set aside: ${count(d.aside.tokens)} tokens, ${span(d.aside.seconds)} of work. Nothing is deleted.`,
						)
					: h('p', {}, 'Nothing is set aside: this is where the run stands.'),
			),
		);
	out.push(
		section(
			'What it holds',
			kv([
				[
					d.forked_from ? 'Taken over' : 'Committed',
					h('span', { title: full(p.t) }, p.t == null ? '–' : `${when(p.t, now)}, ${past(p.t, now)}`),
				],
				[term('tokens', 'Tokens'), `${int(p.consumed_tokens)}  (${count(p.consumed_tokens)})`],
				['Samples', int(p.consumed_samples)],
				d.loss != null && ['Loss there', `${short(d.loss, 4)}, mean of the 50 steps before`],
				[
					'Shape',
					`${p.world_size ?? '–'} worker${p.world_size === 1 ? '' : 's'}, batch ${p.global_batch_size ?? '–'}, length ${p.seq_len ?? '–'}`,
				],
				[
					'Made by',
					d.forked_from
						? 'another run'
						: h(
								'span',
								{},
								term('attempt', 'attempt ' + p.attempt),
								', ',
								term('generation', 'generation ' + p.generation),
							),
				],
				[
					term('parent', 'Parent'),
					h(
						'span',
						{ class: 'mono' },
						d.forked_from ? d.forked_from.run + ' at ' + d.forked_from.point : p.parent || 'the start of the run',
					),
				],
				[term('blocked', 'Blocked'), `${span(p.save_blocked_s)}: training waited while its files were written`],
				[term('written', 'Written'), `${span(p.save_s)} from the first worker’s vote to COMMIT`],
				[
					term('checked', 'Checked'),
					p.state === 'damaged'
						? 'damaged' + (p.checked_at == null ? '' : ', found ' + past(p.checked_at, now))
						: p.checked === 'digests'
							? `every digest right, ${ago(now - p.checked_at)} ago`
							: 'sizes right; digests not read yet',
				],
				p.pinned && [term('pinned', 'Pinned'), `by ${p.pin.by}, ${past(p.pin.t, now)}: ${p.pin.reason}`],
				p.held && [term('held', 'Held'), 'the newest attempt started from it'],
			]),
		),
	);
	out.push(
		section(
			'Commands',
			...Object.entries(d.commands)
				.filter(([k]) =>
					(p.state === 'damaged'
						? ['verify']
						: p.orphan_why
							? ['fork', 'export', 'verify']
							: [d.aside?.steps ? 'rewind' : 'resume', d.newest ? 'resume' : 'rewind', 'fork', 'export', 'verify']
					).includes(k),
				)
				.map(([k, c]) =>
					h(
						'div',
						{ class: 'cmd' },
						h('span', { class: 'muted' }, k),
						h('code', { tabindex: '0' }, c),
						h(
							'button',
							{ class: 'btn icon', 'aria-label': 'Copy the ' + k + ' command', onclick: () => app.copy(c) },
							icon('copy', 's'),
						),
					),
				),
		),
	);
	const cols = ['epoch', 'block', 'window', 'record', 'piece', 'token'];
	out.push(
		section(
			term('cursor', 'Cursor: the next unread token'),
			h(
				'div',
				{ class: 'scrollx' },
				h(
					'table',
					{ class: 't' },
					h(
						'thead',
						{},
						h(
							'tr',
							{},
							h('th', {}, 'Source'),
							...cols.map((c) => h('th', { class: 'num' }, WITH.has(c) ? term(c, c) : c)),
							h('th', { class: 'num' }, 'documents'),
							h('th', { class: 'num' }, 'skipped'),
						),
					),
					h(
						'tbody',
						{},
						...Object.entries(d.cursor?.sources || {}).map(([name, c]) =>
							h(
								'tr',
								{},
								h('td', {}, name),
								...cols.map((k) => h('td', { class: 'num' }, int(c[k]))),
								h('td', { class: 'num' }, int(c.documents)),
								h('td', { class: 'num' }, int(c.bad_documents)),
							),
						),
					),
				),
			),
		),
	);
	out.push(
		section(
			'Configuration: difference to the point before' + (d.before ? '' : ' (no whole one before it is left)'),
			d.differences.length
				? h(
						'table',
						{ class: 't' },
						h(
							'tbody',
							{},
							...d.differences.map((x) =>
								h(
									'tr',
									{},
									h('td', { class: 'mono', title: x.meaning }, x.field),
									h(
										'td',
										{ class: 'mono' },
										h('span', { class: 'diff' }, h('del', {}, text(x.old)), '→', h('ins', {}, text(x.new))),
									),
									h(
										'td',
										{},
										h(
											'span',
											{ class: 'pill ' + ({ same: 'fault', may_change: 'warn' }[x.rule] || '') },
											(x.rule || '–').replace('_', ' '),
										),
									),
								),
							),
						),
					)
				: h('p', { class: 'muted' }, d.before ? 'None.' : 'Nothing to compare with.'),
		),
	);
	out.push(
		section(
			term('manifest', `Manifest: ${d.files.length} files, ${bytes(p.bytes)}`),
			h(
				'div',
				{ class: 'scrollx' },
				h(
					'table',
					{ class: 't' },
					h(
						'thead',
						{},
						h(
							'tr',
							{},
							h('th', {}, h('span', { class: 'sr' }, 'Health')),
							h('th', {}, 'File'),
							h('th', { class: 'num' }, 'Size'),
							h('th', {}, term('digest', 'Digest')),
						),
					),
					h(
						'tbody',
						{},
						...d.files.map((x) =>
							h(
								'tr',
								{},
								h(
									'td',
									{},
									icon(
										x.problem ? 'damaged' : p.checked === 'digests' ? 'ok' : 'sizes',
										's ' + (x.problem ? 'fault' : 'ok'),
										x.problem ? 'damaged' : p.checked === 'digests' ? 'digest right' : 'size right',
									),
								),
								h('td', { class: 'mono' }, x.path, x.problem && h('div', { class: 'fault' }, x.problem)),
								h('td', { class: 'num nowrap', title: int(x.bytes) + ' bytes' }, bytes(x.bytes)),
								h('td', { class: 'mono faint', title: x.digest }, x.digest.slice(0, 12)),
							),
						),
					),
				),
			),
			kv([
				['weights digest', h('span', { class: 'mono' }, d.weights_digest)],
				['list digest', h('span', { class: 'mono' }, d.files_digest)],
			]),
		),
	);
	return out;
}
const WITH = new Set(['epoch', 'block', 'window']);
const text = (v) => {
	const t = val(v);
	return t.length > 90 ? t.slice(0, 88) + '…' : t;
};

export function drawEvent(e, app) {
	return [
		section('What', h('p', {}, e.text)),
		section('When', h('p', {}, full(e.t))),
		section('As the journal has it', h('pre', { class: 'json' }, JSON.stringify(e.fields, null, 2))),
		h('section', {}, h('a', { href: app.link('events', 'attempt', e.attempt) }, 'All events of attempt ' + e.attempt)),
	];
}
