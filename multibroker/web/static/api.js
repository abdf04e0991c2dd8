// Requests to the broker: the token travels in a header, so no other site can make them.

let token = sessionStorage.getItem("token") || "";

export function setToken(value) {
  token = value;
  if (value) sessionStorage.setItem("token", value);
  else sessionStorage.removeItem("token");
}

export const loggedIn = () => token !== "";

function headers(extra = {}) {
  return token ? { authorization: `Bearer ${token}`, ...extra } : extra;
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(method, path, document) {
  const options = { method, headers: headers() };
  if (document !== undefined) {
    options.body = JSON.stringify(document);
    options.headers["content-type"] = "application/json";
  }
  const response = await fetch(`/api/${path}`, options);
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, answer.error || response.statusText);
  return answer;
}

// Server-sent events by fetch, because EventSource cannot send a token. Returns a function
// that ends the stream; `onEvent(name, data)` is called in order, `onEnd(error)` once.
export function stream(path, onEvent, onEnd) {
  const control = new AbortController();
  read(path, control.signal, onEvent).then(
    () => onEnd(null),
    (error) => { if (error.name !== "AbortError") onEnd(error); },
  );
  return () => control.abort();
}

async function read(path, signal, onEvent) {
  const response = await fetch(`/api/${path}`, { headers: headers(), signal });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new ApiError(response.status, answer.error || response.statusText);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const text of events) dispatch(text, onEvent);
  }
}

function dispatch(text, onEvent) {
  let name = "message";
  let data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (data) onEvent(name, JSON.parse(data));
}
