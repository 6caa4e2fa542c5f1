// Requests and streams of server-sent events, with a token where the server requires one.
//
// Streams are read with fetch, because EventSource cannot send a token. In an exported file, all data
// is read from the file itself and no requests are made.
(() => {
  "use strict";
  const { keptForSession } = window.agentloop;

  const SILENT_MS = 45_000; // reconnect after this long without data; the server sends keep-alives more often
  const HIDDEN_MS = 20_000; // a hidden page disconnects after this long
  const BACKOFF_MS = [300, 1000, 2000, 4000, 8000, 15_000];

  let exported; // path to body, or null if this is not an exported file; read lazily, after the document is complete
  const inExport = () => {
    if (exported === undefined) {
      const node = document.getElementById("run");
      exported = node ? JSON.parse(node.textContent) : null;
    }
    return exported;
  };

  class ApiError extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  // --- tokens ---------------------------------------------------------------------------------

  // "token" (serve.token) may be required by all of api/, "control" in addition by api/control.
  // After a refusal the reader is asked for the token, once for all requests refused at the same time.
  const REFUSED = { 401: "token", 403: "control" };
  let ask = async () => null;
  const asking = new Map();

  const askFor = (kind, used, reason) => {
    const known = keptForSession.get(kind);
    if (known && known !== used) return Promise.resolve(known); // entered for another request
    if (!asking.has(kind)) {
      const answer = ask(kind, reason).then((token) => {
        if (token) keptForSession.set(kind, token);
        return token;
      });
      asking.set(
        kind,
        answer.finally(() => asking.delete(kind)),
      );
    }
    return asking.get(kind);
  };

  const send = async (path, { kind = "token", headers = {}, ...options } = {}) => {
    if (kind === "control" && !keptForSession.get(kind) && !(await askFor(kind, null, "")))
      throw new ApiError(403, "the control token is required");
    for (;;) {
      const [token, control] = [keptForSession.get("token"), keptForSession.get("control")];
      const sent = { ...headers };
      if (token) sent.Authorization = `Bearer ${token}`;
      if (kind === "control") sent["X-Control-Token"] = control;
      const response = await fetch(path, { cache: "no-store", ...options, headers: sent }).catch((error) => {
        throw error instanceof TypeError ? new ApiError(0, "the server is not responding") : error;
      });
      if (response.ok) return response;
      const error = await failure(response);
      const wanted = REFUSED[response.status];
      if (!wanted || (wanted === "control" && kind !== "control")) throw error;
      const used = wanted === "control" ? control : token;
      if (used && keptForSession.get(wanted) === used) keptForSession.set(wanted, null);
      if (!(await askFor(wanted, used, used ? error.message : ""))) throw error;
    }
  };

  const failure = async (response) => {
    let message = `${response.status} ${response.statusText}`;
    try {
      const { error } = await response.json();
      message = (typeof error === "string" ? error : error?.message) || message;
    } catch {
      // Not JSON: the response may come from a proxy.
    }
    return new ApiError(response.status, message);
  };

  // --- streams --------------------------------------------------------------------------------

  // Returns a function that parses chunks of text into events {id, event, data}; lines end in LF or CRLF.
  const parser = (onEvent) => {
    let pieces = []; // of an incomplete line
    let [id, event, data] = ["", "", []];
    const line = (text) => {
      if (text === "") {
        if (data.length) onEvent({ id, event: event || "message", data: data.join("\n") });
        [event, data] = ["", []];
        return;
      }
      const colon = text.indexOf(":");
      if (colon === 0) return; // a comment
      const name = colon < 0 ? text : text.slice(0, colon);
      const value = colon < 0 ? "" : text.slice(colon + (text[colon + 1] === " " ? 2 : 1));
      if (name === "data") data.push(value);
      else if (name === "event") event = value;
      else if (name === "id") id = value;
    };
    return (text) => {
      let start = 0;
      for (let end; (end = text.indexOf("\n", start)) >= 0; start = end + 1) {
        pieces.push(text.slice(start, end));
        const whole = pieces.length === 1 ? pieces[0] : pieces.join("");
        pieces = [];
        line(whole.endsWith("\r") ? whole.slice(0, -1) : whole);
      }
      if (start < text.length) pieces.push(text.slice(start));
    };
  };

  // Reads the stream `path` and reconnects when it breaks, resuming after the last event. `handlers`: open(),
  // event({event, data}), which returns true to end the stream, and lost(error, retryMs), where null means that
  // it will not retry. With `pauses`, it disconnects while the page is hidden: browsers allow only six
  // connections to a server across all tabs.
  const subscribe = (path, handlers, { pauses = false } = {}) => {
    let [closed, lastId, failures, hiddenTimer] = [false, "", 0, 0];
    let [abort, wake] = [null, () => {}];

    const once = async () => {
      abort = new AbortController();
      let silenceTimer = 0;
      const received = () => {
        clearTimeout(silenceTimer);
        silenceTimer = setTimeout(() => abort.abort(), SILENT_MS);
      };
      try {
        const headers = { Accept: "text/event-stream" };
        if (lastId) headers["Last-Event-ID"] = lastId;
        const response = await send(path, { headers, signal: abort.signal });
        handlers.open?.();
        received();
        const feed = parser(({ id, event, data }) => {
          if (closed) return;
          if (id) lastId = id;
          failures = 0;
          if (handlers.event({ event, data: JSON.parse(data) }) === true) close();
        });
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (;;) {
          const { done, value } = await reader.read();
          if (done) return;
          received();
          feed(value);
        }
      } finally {
        clearTimeout(silenceTimer);
        abort.abort();
      }
    };

    const loop = async () => {
      while (!closed) {
        let error = null;
        try {
          await once();
        } catch (caught) {
          error = caught;
        }
        if (closed) return;
        if (pauses && document.hidden) {
          await new Promise((resolve) => (wake = resolve)); // until the page is visible
          continue;
        }
        const final = error instanceof ApiError && error.status >= 400 && error.status < 500;
        if (final && error.status !== 401) {
          close();
          return handlers.lost?.(error, null);
        }
        const wait = BACKOFF_MS[Math.min(failures++, BACKOFF_MS.length - 1)] * (0.8 + 0.4 * Math.random());
        handlers.lost?.(error, error?.status === 401 ? null : wait);
        await new Promise((resolve) => {
          wake = resolve;
          if (error?.status !== 401) setTimeout(resolve, wait);
        });
      }
    };

    const retry = () => wake();
    const visibilityChanged = () => {
      clearTimeout(hiddenTimer);
      if (!document.hidden) retry();
      else if (pauses) hiddenTimer = setTimeout(() => abort?.abort(), HIDDEN_MS);
    };
    const close = () => {
      closed = true;
      clearTimeout(hiddenTimer);
      document.removeEventListener("visibilitychange", visibilityChanged);
      window.removeEventListener("online", retry);
      abort?.abort();
      wake();
    };
    document.addEventListener("visibilitychange", visibilityChanged);
    window.addEventListener("online", retry);
    loop();
    return { close, retry };
  };

  // --- for views --------------------------------------------------------------------------------

  const get = async (path) => {
    const bodies = inExport();
    if (!bodies) return (await send(path)).json();
    if (Object.hasOwn(bodies, path)) return structuredClone(bodies[path]);
    throw new ApiError(404, "not included in the exported file");
  };

  const post = async (path, body, { kind } = {}) => {
    if (inExport()) throw new ApiError(409, "not available in an exported file");
    const headers = { "Content-Type": "application/json" };
    return (await send(path, { kind, method: "POST", headers, body: JSON.stringify(body) })).json();
  };

  // Watches a stream with `handlers` by event name, the last of which is `end`, and error(Error) if it fails.
  const watch = (path, handlers) => {
    if (inExport()) {
      let closed = false;
      get(path.replace(/\/stream$/, "")).then(
        (data) => {
          if (closed) return;
          handlers.trajectory?.(data);
          handlers.end?.(data);
        },
        (error) => closed || handlers.error?.(error),
      );
      return () => (closed = true);
    }
    const event = ({ event: name, data }) => {
      handlers[name]?.(data);
      return name === "end";
    };
    const lost = (error, retryMs) => {
      if (retryMs === null) handlers.error?.(error);
    };
    return subscribe(path, { event, lost }, { pauses: true }).close;
  };

  window.agentloop.api = {
    ApiError,
    get exported() {
      return inExport() !== null;
    },
    get,
    post,
    watch,
    subscribe,
    parser,
    askWith: (how) => (ask = how),
  };
})();
