/** What the page asks the server, and which of the page's states an answer or its absence means. */

const PATIENCE_MS = 8000;

/** What went wrong: `kind` is one of unreachable, unauthorised, forbidden, refused. */
export class Failure extends Error {
  constructor(kind, message, status = 0) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
}

/** Beside this module, so that the page works behind a proxy that puts a prefix before its paths. */
function beside(name, query = {}) {
  const url = new URL(name, import.meta.url);
  url.search = new URLSearchParams(query);
  return url;
}

async function ask(path, options = {}, patienceMs = PATIENCE_MS) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Failure("unreachable", late ? `no answer within ${patienceMs / 1000} s` : "no connection to the server");
  }
  const told = await response.json().catch((error) => {
    // The head came, and the rest did not: a slow link, not a refusal.
    if (error.name === "TimeoutError" || error.name === "TypeError") throw new Failure("unreachable", `no whole answer within ${patienceMs / 1000} s`);
    return null;
  });
  if (response.ok && told !== null) return told;
  const why = typeof told?.error === "string" ? told.error : `the server answered with status ${response.status}`;
  const kind = { 401: "unauthorised", 403: "forbidden" }[response.status] ?? "refused";
  throw new Failure(kind, why, response.status);
}

/** All that the page shows of the last `windowS` seconds, beside the reference; series and rewards of one model, or all. */
export function snapshot(windowS, reference, model = null) {
  return ask(beside("snapshot", { window: windowS, reference, ...(model === null ? {} : { model }) }));
}

/** The best and the worst samples of that time. */
export function samples(model, windowS) {
  return ask(beside("samples", { model, window: windowS }));
}

/** Scores the responses; a model may take its time. */
export function tryOut(request) {
  const headers = { "content-type": "application/json" };
  return ask(beside("try"), { method: "POST", headers, body: JSON.stringify(request) }, 120_000);
}
