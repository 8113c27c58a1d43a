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

async function ask(path, options = {}, patienceMs = PATIENCE_MS) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(patienceMs) });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Failure("unreachable", late ? `no answer within ${patienceMs / 1000} s` : "no connection to the server");
  }
  const told = await response.json().catch(() => null);
  if (response.ok && told !== null) return told;
  const why = typeof told?.error === "string" ? told.error : `the server answered with status ${response.status}`;
  const kind = { 401: "unauthorised", 403: "forbidden" }[response.status] ?? "refused";
  throw new Failure(kind, why, response.status);
}

/** All that the page shows of the last `windowS` seconds, beside the reference. */
export function snapshot(windowS, reference) {
  return ask(`/dashboard/snapshot?${new URLSearchParams({ window: windowS, reference })}`);
}

/** The best and the worst samples of that time. */
export function samples(model, windowS) {
  return ask(`/dashboard/samples?${new URLSearchParams({ model, window: windowS })}`);
}

/** Scores the responses; a model may take its time. */
export function tryOut(request) {
  const headers = { "content-type": "application/json" };
  return ask("/dashboard/try", { method: "POST", headers, body: JSON.stringify(request) }, 120_000);
}
