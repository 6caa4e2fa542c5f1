// Requests, and streams of server-sent events, with a token where one is asked for.
//
// Streams are read by fetch, since EventSource cannot send a token. In an exported file everything is
// answered from what lies in the page; nothing is asked of anybody.
(() => {
  "use strict";
  const { keptForSession } = window.agentloop;

  const SILENT_MS = 45_000; // the server says something, if only a comment, more often than that
  const REST_MS = 20_000;
  const BACKOFF_MS = [300, 1000, 2000, 4000, 8000, 15_000];

  let exported; // path to body; null: this is no export. Read late, for the scripts may stand before it
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

  // "token" (serve.token) is what all of api/ may want, "control" what api/control wants besides.
  // Whoever is refused asks the reader, once for all that were refused meanwhile.
  const REFUSED = { 401: "token", 403: "control" };
  let ask = async () => null;
  const asking = new Map();

  const askFor = (kind, used, reason) => {
    const known = keptForSession.get(kind);
    if (known && known !== used) return Promise.resolve(known); // another request has asked already
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
      throw new ApiError(403, "not without the control token");
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
      // No JSON: whatever stands in between has answered.
    }
    return new ApiError(response.status, message);
  };

  // --- streams --------------------------------------------------------------------------------

  // Text in, events out: {id, event, data}. Lines end as they like.
  const parser = (onEvent) => {
    let pieces = []; // of a line that is not whole yet
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

  // Reads `path` for ever, again after every break, from where it was. `handlers`: open(),
  // event({event, data}) -> true ends it, lost(error, retryMs | null for never). With `rests` it is
  // not read while nobody sees the page: a browser has six connections for all tabs of a server.
  const subscribe = (path, handlers, { rests = false } = {}) => {
    let [closed, lastId, failures, resting] = [false, "", 0, 0];
    let [abort, wake] = [null, () => {}];

    const once = async () => {
      abort = new AbortController();
      let silent = 0;
      const heard = () => {
        clearTimeout(silent);
        silent = setTimeout(() => abort.abort(), SILENT_MS);
      };
      try {
        const headers = { Accept: "text/event-stream" };
        if (lastId) headers["Last-Event-ID"] = lastId;
        const response = await send(path, { headers, signal: abort.signal });
        handlers.open?.();
        heard();
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
          heard();
          feed(value);
        }
      } finally {
        clearTimeout(silent);
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
        if (rests && document.hidden) {
          await new Promise((resolve) => (wake = resolve)); // until somebody sees it
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
    const seen = () => {
      clearTimeout(resting);
      if (!document.hidden) retry();
      else if (rests) resting = setTimeout(() => abort?.abort(), REST_MS);
    };
    const close = () => {
      closed = true;
      clearTimeout(resting);
      document.removeEventListener("visibilitychange", seen);
      window.removeEventListener("online", retry);
      abort?.abort();
      wake();
    };
    document.addEventListener("visibilitychange", seen);
    window.addEventListener("online", retry);
    loop();
    return { close, retry };
  };

  // --- what views use ---------------------------------------------------------------------------

  const get = async (path) => {
    const bodies = inExport();
    if (!bodies) return (await send(path)).json();
    if (Object.hasOwn(bodies, path)) return structuredClone(bodies[path]);
    throw new ApiError(404, "this is not in the exported file");
  };

  const post = async (path, body, { kind } = {}) => {
    if (inExport()) throw new ApiError(409, "this is an exported file: nobody is there to be asked");
    const headers = { "Content-Type": "application/json" };
    return (await send(path, { kind, method: "POST", headers, body: JSON.stringify(body) })).json();
  };

  // `handlers` by the names of events; `end` is the last one. Also error(Error): it will not come.
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
    return subscribe(path, { event, lost }, { rests: true }).close;
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
