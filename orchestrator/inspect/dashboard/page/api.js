// The only place that talks to the server. The token comes in the address once (#token=…), then lives in this tab.
let token = null;
export function takeToken() {
	// whether the address brought one; it does not stay there
	const m = location.hash.match(/^#token=([\w-]+)$/);
	if (!m) return false;
	token = m[1];
	history.replaceState(null, '', location.pathname + '#/');
	try {
		sessionStorage.setItem('token', token);
	} catch {
		/* storage may be closed */
	}
	return true;
}
if (!takeToken())
	try {
		token = sessionStorage.getItem('token');
	} catch {
		/* closed */
	}
const headers = (more) => ({ ...(token ? { Authorization: 'Bearer ' + token } : {}), ...more });

export class ApiError extends Error {
	constructor(status, body) {
		super(body?.error?.text || 'HTTP ' + status);
		this.status = status;
		Object.assign(this, body?.error || {});
	}
}
function url(path, query = {}) {
	const q = new URLSearchParams(Object.entries(query).filter(([, v]) => v != null && v !== ''));
	return 'api/' + path + (q.size ? '?' + q : '');
}
async function ask(path, query, init = {}) {
	let answer;
	try {
		answer = await fetch(url(path, query), { ...init, headers: headers(init.headers) });
	} catch {
		throw new ApiError(0, {
			error: {
				code: 'unreachable',
				text: 'This page’s server does not answer.',
				do: 'Is orchestrator dashboard still running? Each start of it prints a new link.',
			},
		});
	}
	const body = await answer.json().catch(() => null);
	if (!answer.ok) throw new ApiError(answer.status, body);
	return body;
}
export const get = (path, query) => ask(path, query);
export const post = (path, value) =>
	ask(path, {}, { method: 'POST', body: JSON.stringify(value), headers: { 'Content-Type': 'application/json' } });
export const runPath = (name) => 'runs/' + encodeURIComponent(name);

// Server-sent events over fetch: EventSource cannot send the token. Goes on after the last id it saw.
export function stream(path, on, status) {
	const stop = new AbortController();
	let last = '',
		wait = 1000;
	(async () => {
		while (!stop.signal.aborted) {
			try {
				const answer = await fetch(url(path), {
					headers: headers({ Accept: 'text/event-stream', ...(last ? { 'Last-Event-ID': last } : {}) }),
					signal: stop.signal,
				});
				if (answer.status === 401 || answer.status === 404) return status(answer.status === 401 ? 'shut' : 'still');
				if (!answer.ok) throw new Error(answer.status);
				status('live');
				wait = 1000;
				const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
				let rest = '';
				for (;;) {
					const { value, done } = await reader.read();
					if (done) break;
					const parts = (rest + value).split('\n\n');
					rest = parts.pop();
					for (const p of parts) {
						const f = Object.fromEntries(
							p
								.split('\n')
								.filter((l) => l && l[0] !== ':')
								.map((l) => {
									const i = l.indexOf(': ');
									return [l.slice(0, i), l.slice(i + 2)];
								}),
						);
						if (f.id) last = f.id;
						if (f.data) on(f.event, JSON.parse(f.data));
					}
				}
			} catch {
				/* below */
			}
			if (stop.signal.aborted) return;
			status('lost');
			await new Promise((r) => setTimeout(r, wait));
			wait = Math.min(15000, wait * 1.7);
		}
	})();
	return () => stop.abort();
}
