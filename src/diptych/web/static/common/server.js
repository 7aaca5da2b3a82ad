/** How the page talks to its server: addresses, the API key, errors in words. */

let key = "";
try {
  key = sessionStorage.getItem("diptych-key") || "";
} catch {
  // No storage: the key is asked for once per page.
}

export const hasKey = () => Boolean(key);

export function setKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem("diptych-key", key);
  } catch {
    // As above.
  }
}

export const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** A reply that is not 2xx: its status, and what the server said. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET of JSON. Raises ServerError, or TypeError when there is no connection. */
export async function getJson(path) {
  const reply = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!reply.ok) throw await errorOf(reply);
  return reply.json();
}

/** POST of JSON; the reply, not read yet. */
export async function post(path, body, signal) {
  const reply = await fetch(path, { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!reply.ok) throw await errorOf(reply);
  return reply;
}

/** The error that a reply stands for. */
export async function errorOf(reply) {
  let message = `the server answered ${reply.status}`;
  const text = await reply.text();
  try {
    message = JSON.parse(text).error.message;
  } catch {
    if (text) message += `: ${text.slice(0, 200)}`;
  }
  return new ServerError(reply.status, message);
}
